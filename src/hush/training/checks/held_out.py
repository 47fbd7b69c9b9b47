"""What holds the records of a data set in memory, and whether two of them hold the same ones."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hush.gradients.tree import tree_leaves

_DEEP = 8
"""How many wrappers are looked into."""


@dataclass(frozen=True, eq=False)
class Holder:
    """A data set or a tensor, and which of its rows are meant (None: all of them)."""

    source: Any
    rows: npt.NDArray[np.int64] | None = None

    def of(self, rows: Sequence[int]) -> "Holder":
        """These of the rows that are meant."""
        chosen = np.asarray(rows, dtype=np.int64)
        return Holder(self.source, chosen if self.rows is None else self.rows[chosen])


def holders(data: Any, deep: int = _DEEP) -> Iterator[Holder]:
    """The data set itself, the data sets that it wraps, and the tensors with its inputs.

    A wrapper of another kind is taken to show all rows of what it holds where it has as many of them;
    otherwise it picks, and which ones cannot be told.
    """
    if isinstance(data, Tensor):
        yield Holder(data)
        return
    yield Holder(data)
    if deep == 0:
        return
    if isinstance(data, Subset):
        for held in holders(data.dataset, deep - 1):
            yield held.of(data.indices)
    elif isinstance(data, TensorDataset):
        yield from map(Holder, data.tensors[:1])
    elif isinstance(data, ConcatDataset):
        for part in data.datasets:
            yield from holders(part, deep - 1)
    elif isinstance(data, (tuple, list)):
        yield from map(Holder, tree_leaves(data[:1]))
    elif hasattr(data, "__len__") and hasattr(data, "__dict__"):
        for part in vars(data).values():
            if hasattr(part, "__len__") and not isinstance(part, str) and len(part) == len(data):
                yield from holders(part, deep - 1)


def overlapping(one: Holder, other: Holder) -> bool:
    """Whether a row of one is a row of the other."""
    if isinstance(one.source, Tensor) and isinstance(other.source, Tensor):
        return _share_rows(_row_memory(one), _row_memory(other))
    if one.source is not other.source:
        return False
    if one.rows is None or other.rows is None:
        return True
    return bool(np.isin(one.rows, other.rows).any())


def _row_memory(holder: Holder) -> tuple[torch.device, npt.NDArray[np.int64], int]:
    """The device, and the addresses at which rows begin and how long each is, in bytes."""
    tensor: Tensor = holder.source
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.is_meta:
        return tensor.device, np.zeros(0, dtype=np.int64), 0
    row = tensor[0] if tensor.dim() else tensor
    reach = sum((size - 1) * step for size, step in zip(row.shape, row.stride(), strict=True)) + 1
    numbers = np.arange(len(tensor) if tensor.dim() else 1)
    step = tensor.stride(0) if tensor.dim() else 0
    chosen = numbers if holder.rows is None else numbers[holder.rows]
    starts = tensor.data_ptr() + chosen * step * tensor.element_size()
    return tensor.device, np.sort(starts), reach * tensor.element_size()


def _share_rows(
    one: tuple[torch.device, npt.NDArray[np.int64], int],
    other: tuple[torch.device, npt.NDArray[np.int64], int],
) -> bool:
    (device, starts, length), (elsewhere, others, reach) = one, other
    if device != elsewhere or not len(starts) or not len(others):
        return False
    # the last of the others that begins before a row ends: does it end after the row begins?
    place = np.searchsorted(others, starts + length, side="left") - 1
    return bool((others[place[place >= 0]] + reach > starts[place >= 0]).any())
