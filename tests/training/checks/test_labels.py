from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.core.errors import DataError

PLAN = hush.Plan(
    sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
)


class Rows:
    """A data set whose labels are seen only when they are drawn."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.rows = list(zip(inputs, targets, strict=True))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index]


def run(model: nn.Module, loss: Any, data: Any, ledger: Path | None = None) -> hush.PrivateStep:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, loss, optimizer, PLAN, records=6, ledger=ledger)
    for batch in step.batches(data, steps=1):
        step(batch)
    return step


def labels(*values: int) -> tuple[Tensor, Tensor]:
    return torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 0, *values])[-6:]


@pytest.mark.parametrize("wrong", [8191, -8191, 2])
@pytest.mark.parametrize("place", [0, 5])
def test_a_label_that_is_no_class_is_refused_and_not_shown(
    wrong: int, place: int, tmp_path: Path
) -> None:
    inputs, targets = labels()
    targets[place] = wrong
    with pytest.raises(DataError, match="private and not shown") as raised:
        run(nn.Linear(3, 2), nn.CrossEntropyLoss(), (inputs, targets), tmp_path / "ledger")
    assert "8191" not in f"{raised.value}{raised.value.__cause__}"
    assert not hush.Ledger(tmp_path / "ledger", read_only=True).counts


def test_a_label_to_be_ignored_is_no_mistake() -> None:
    inputs, targets = labels()
    targets[2] = -100
    assert run(nn.Linear(3, 2), nn.CrossEntropyLoss(), (inputs, targets)).steps == 1


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        lambda outputs, y: nn.functional.cross_entropy(outputs, y, reduction="none"),
    ],
    ids=["data set", "function"],
)
def test_what_is_seen_only_under_way_is_not_shown_either(loss: Callable[..., Tensor]) -> None:
    inputs, targets = labels()
    targets[4] = 8191
    data = Rows(inputs, targets)
    model = nn.Linear(3, 2)
    before = model.weight.clone()
    with pytest.raises(DataError, match="private and not shown") as raised:
        run(model, loss, data)
    assert "8191" not in f"{raised.value}{raised.value.__cause__}"
    assert raised.value.__suppress_context__
    assert torch.equal(model.weight, before)


def test_a_token_that_is_not_in_the_embedding_is_not_shown() -> None:
    tokens = torch.zeros(6, 3, dtype=torch.int64)
    tokens[5, 1] = 8191
    model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 2))
    with pytest.raises(DataError, match="private and not shown"):
        run(model, nn.CrossEntropyLoss(), (tokens, labels()[1]))


def test_a_selective_test_does_not_show_it_either() -> None:
    inputs, targets = labels()
    targets[:] = 8191
    targets[:2] = 0
    release = hush.Selective(rate=1.0, clip=1.0, multiplier=1.0, test="mean")
    plan = hush.Plan(
        sampling=hush.Poisson(rate=1e-9), clipping=PLAN.clipping, noise=PLAN.noise, release=release
    )
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = hush.PrivateStep(model, nn.CrossEntropyLoss(), optimizer, plan, records=6)
    batch = next(step.batches(Rows(inputs, targets)))  # none of them in the batch, all in the test
    with pytest.raises(DataError, match="private and not shown"):
        step(batch)
