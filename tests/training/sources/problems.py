"""Sources of records that draw, and that cannot be read, and steps on them."""

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import hush
from hush.core.randomness import Stream
from hush.training.data import Batch, Data
from tests.training.helpers import plan_of, step_of

KEY = bytes(range(32))


class Items(Dataset[Any]):
    """Map-style data set whose items are results of a function of their number."""

    def __init__(self, item: Callable[[int], Any], rows: int = 8) -> None:
        self.item, self.rows = item, rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


def noisy(index: int) -> tuple[Tensor, int]:
    """Record to which each generator that people use adds something; some draw more than others."""
    for _ in range(1 + index % 3):
        draws = [float(torch.rand(())), np.random.rand(), random.random()]  # noqa: NPY002
    return torch.tensor([index, *draws]), index % 2


def files(missing: Sequence[int] = ()) -> Items:
    """Records in files, of which some are missing: an error names the person."""

    def item(index: int) -> tuple[Tensor, int]:
        if index in missing:
            Path(f"/nowhere/alice-{index}.txt").read_text()
        return torch.full((4,), float(index)), index % 2

    return Items(item)


def pad_to_longest(records: list[tuple[Any, int]]) -> tuple[dict[str, Tensor], Tensor]:
    """As people write it: padded to the longest of the batch, with a mask."""
    rows = [torch.as_tensor(words) for words, _ in records]
    words = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"words": words, "mask": words > 0}, torch.tensor([label for _, label in records])


class Bag(nn.Module):
    """Mean of word vectors, by a mask or over the padding as well."""

    def __init__(self, *, masked: bool = True) -> None:
        super().__init__()
        self.embedding, self.dropout, self.scores = nn.Embedding(20, 6), nn.Dropout(0.2), nn.Linear(6, 3)
        self.masked = masked

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        weights = (mask if self.masked else torch.ones_like(mask)).float().unsqueeze(-1)
        mean = (self.embedding(words) * weights).sum(1) / weights.sum(1).clamp(min=1)
        scores: Tensor = self.scores(self.dropout(mean))
        return scores


def batches(data: Data, slots: list[int], physical: int, key: bytes = KEY) -> Iterator[tuple[Any, Any]]:
    """Physical batches of some slots as a step gets them."""
    parts = Batch(torch.tensor(slots), data, physical).physical_batches(Stream(torch.device("cpu"), key))
    return ((inputs, targets) for inputs, targets, _, _ in parts)


def rows(data: Data, slots: list[int], physical: int, key: bytes = KEY) -> list[list[float]]:
    """Inputs of some slots."""
    return [row for inputs, _ in batches(data, slots, physical, key) for row in inputs.tolist()]


def step_for(
    records: int | None, plan: Any = None, device: str = "cpu", **options: Any
) -> hush.PrivateStep:
    torch.manual_seed(0)
    plan = plan or plan_of(hush.Poisson(0.5))
    return step_of(torch.nn.Linear(4, 2).to(device), plan, seed=1, records=records, **options)
