"""Evaluation and public records stand apart from the private ones, and those from each other."""

import hashlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hush.core.errors import DataError
from hush.gradients.tree import tree_leaves
from hush.training.data import Data, Source, count, take
from hush.training.sources.records import leaves

_AT_ONCE = 512
_DEEP = 8
"""How many wrappers are looked into."""


def check_held_out(evaluation: Data, data: Data) -> None:
    """Raise if the evaluation data is the training data or has records in common with it.

    Compared is what holds them: the data set, its subsets, and the memory of its inputs, whatever wraps
    them. Two parts of one tensor or data set without a common record are apart. Copies are not found.

    Args:
        evaluation: Records whose loss and accuracy are to be reported without noise.
        data: The private records.
    """
    for first in holders(evaluation):
        for second in holders(data):
            if overlapping(first, second):
                raise DataError(
                    "the evaluation data is the training data, or shares records with it: its loss and "
                    "accuracy would be reported without being charged. Pass records that need no "
                    "protection and are in other rows."
                )


def check_public(public: Data, private: Data) -> None:
    """Raise if the public set is the private one, or has an input in common with it.

    Inputs are compared exactly (as single-precision numbers, whatever the labels): a record that was
    changed a little, by augmentation for instance, is not found. Whether this raises depends on the
    private records. It is a guard against a mistake, to stop a run before anything is released, and
    not part of what is released.
    """
    for ours in _holding(public):
        if any(ours is theirs for theirs in _holding(private)):
            raise DataError(f"the public data is the private data itself: {_REASON}")
    public_names = set(input_names(public, torch.arange(count(public))))
    if any(name in public_names for name in input_names(private, torch.arange(count(private)))):
        raise DataError(f"private records have the same inputs as public ones: {_REASON}")


def check_distinct(data: Data) -> None:
    """Raise if a record is in several slots, as far as what holds the records tells.

    Looked at are subsets with repeated numbers and concatenated data sets with common records, whatever
    wraps them. Copies, and equal rows of a tensor, which may be two people's, are not found.

    Args:
        data: the private records, of which each slot is a unit.
    """
    repeated = any(
        holder.rows is not None and (np.diff(np.sort(holder.rows)) == 0).any()
        for holder in holders(data)
    )
    whole = data.dataset if isinstance(data, Source) else data
    parts = whole.datasets if isinstance(whole, ConcatDataset) else []
    pairs = (
        (first, second)
        for ours, theirs in combinations(parts, 2)
        for first in holders(ours)
        for second in holders(theirs)
    )
    if repeated or any(overlapping(first, second) for first, second in pairs):
        raise DataError(
            "a record is in several slots (numbers repeated in a Subset or a select, or parts of a "
            "concatenated data set that share records): each slot is drawn and clipped by itself, so "
            "that the record would count several times and cost more than is charged. Pass each record "
            "once, and augment it when it is read (or by views=); over-sample by class weights in the "
            "loss. To bound what several records of one person add, pass units=."
        )


_REASON = (
    "what is worked out from public records is released without noise and without a charge, so a record "
    "in both sets has no protection. Split the records before training, equal ones to the same side, "
    "or generate public ones."
)


def _holding(data: Data) -> Iterator[Any]:
    """What holds the records: the data set itself, and its inputs where they are in memory."""
    data = data.dataset if isinstance(data, Source) else data
    yield data
    holder = getattr(data, "tensors", data)
    if isinstance(holder, (tuple, list)) and holder:
        yield from leaves(holder[0])


def input_names(data: Data, slots: Tensor) -> Iterator[bytes]:
    """A name for the input in each of these slots; equal inputs have equal names."""
    for indices in slots.split(_AT_ONCE):
        parts = [_plain(part) for part in tree_leaves(take(data, indices)[0])]
        for row in range(len(indices)):
            name = hashlib.blake2b(digest_size=16)
            for part in parts:
                name.update(part[row].tobytes())
            yield name.digest()


def _plain(part: Tensor) -> Any:
    """The numbers as numpy has them, in one precision and with one zero."""
    kind = torch.float32 if part.is_floating_point() else torch.int64
    return (part.detach().to("cpu", kind) + 0).unsqueeze(-1).flatten(1).contiguous().numpy()


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
    if isinstance(data, np.ndarray) and data.dtype.kind in "biufc":
        with warnings.catch_warnings():  # of memory that is read-only, which nothing here writes to
            warnings.simplefilter("ignore")
            data = torch.from_numpy(data.view(data.dtype.newbyteorder("=")))
    if isinstance(data, Tensor):
        yield Holder(data)
        return
    yield Holder(data)
    if deep == 0:
        return
    if isinstance(data, Subset):
        for holder in holders(data.dataset, deep - 1):
            yield holder.of(data.indices)
    elif isinstance(data, TensorDataset):
        yield from map(Holder, data.tensors[:1])
    elif isinstance(data, ConcatDataset):
        for part in data.datasets:
            yield from holders(part, deep - 1)
    elif isinstance(data, (tuple, list)):
        for part in leaves(data[:1]):
            yield from holders(part, deep - 1)
    elif isinstance(data, Source):
        yield from holders(data.dataset, deep - 1)
    elif hasattr(data, "_indices") and hasattr(getattr(data, "data", None), "table"):
        yield from _arrow_rows(data)
    elif hasattr(data, "__len__") and hasattr(data, "__dict__"):
        for part in vars(data).values():
            if hasattr(part, "__len__") and not isinstance(part, str) and len(part) == len(data):
                yield from holders(part, deep - 1)


_ARROW = object()
"""What holds the rows of Arrow tables: the memory of the process, whose addresses are their numbers."""


def _arrow_rows(dataset: Any) -> Iterator[Holder]:
    """Addresses of a Hugging Face data set's rows, of each column that has an address for every row.

    `select`, `shuffle`, `train_test_split`, `concatenate_datasets` and their like copy no column: a row
    that two data sets hold, or one holds twice, has one address. What `map` writes anew is a copy.
    """
    order = dataset._indices
    rows = None if order is None else np.asarray(order.column(0), dtype=np.int64)
    for column in dataset.data.table.columns:
        starts = [_addresses(chunk) for chunk in column.chunks if len(chunk)]
        if not starts or any(part is None for part in starts):
            continue
        addresses = np.concatenate([part for part in starts if part is not None])
        yield Holder(_ARROW, addresses if rows is None else addresses[rows])


def _addresses(chunk: Any) -> npt.NDArray[np.int64] | None:
    """Where the rows of an Arrow array begin, in bytes: their numbers, or the offsets of their values.

    None where a row has no whole bytes of its own (yes or no, rows made of several columns).
    """
    name = str(chunk.type)
    if name.startswith(("string", "binary", "list<")):
        width = 4
    elif name.startswith(("large_string", "large_binary", "large_list<")):
        width = 8
    else:
        width = getattr(chunk.type, "byte_width", 0) if name.startswith(_NUMBERS) else 0
    buffer = chunk.buffers()[1] if width else None
    if buffer is None:
        return None
    return np.asarray(buffer.address + width * (chunk.offset + np.arange(len(chunk))), dtype=np.int64)


_NUMBERS = ("int", "uint", "float", "double", "halffloat", "date", "time", "duration", "decimal")


def overlapping(first: Holder, second: Holder) -> bool:
    """Whether a row of one is a row of the other."""
    if isinstance(first.source, Tensor) and isinstance(second.source, Tensor):
        return _share_rows(_row_memory(first), _row_memory(second))
    if first.source is not second.source:
        return False
    if first.rows is None or second.rows is None:
        return True
    return _any_common(first.rows, second.rows)


def _any_common(first: npt.NDArray[np.int64], second: npt.NDArray[np.int64]) -> bool:
    """Whether two lists have a number in common: by sorting, which is 20 times as fast as `np.isin`."""
    fewer, more = sorted((first, second), key=len)
    if not len(fewer):
        return False
    fewer = np.sort(fewer)
    more = more[(more >= fewer[0]) & (more <= fewer[-1])]  # none is left of another column's addresses
    return bool((fewer[np.searchsorted(fewer, more)] == more).any())


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
    first: tuple[torch.device, npt.NDArray[np.int64], int],
    second: tuple[torch.device, npt.NDArray[np.int64], int],
) -> bool:
    (device, starts, length), (elsewhere, second_starts, reach) = first, second
    if device != elsewhere or not len(starts) or not len(second_starts):
        return False
    # the last of the others that begins before a row ends: does it end after the row begins?
    place = np.searchsorted(second_starts, starts + length, side="left") - 1
    return bool((second_starts[place[place >= 0]] + reach > starts[place >= 0]).any())
