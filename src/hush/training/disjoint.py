"""Checks that evaluation, public and private records are distinct: they catch an honest mistake.

A record is identified by the data set that holds it and its number there, or by the memory of its input.
Copies are not found, except among public records. The result depends on the private records. The checks
stop a run before anything is released and are not part of the release.
"""

import hashlib
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
from hush.training.data import Data, count, take
from hush.training.records import leaves
from hush.training.source import Source

_AT_ONCE = 512
_DEPTH = 3
"""Number of nested data sets that are searched."""


def check_held_out(evaluation: Data, data: Data) -> None:
    """Raise if the evaluation data shares records with the training data.

    Args:
        evaluation: Records whose loss and accuracy are reported without noise.
        data: Private records.
    """
    if _share_records(evaluation, data):
        raise DataError(
            "the evaluation data is the training data, or shares records with it: its loss and "
            "accuracy would be reported without being charged. Pass records that need no "
            "protection and are in other rows."
        )


def check_public(public: Data, private: Data) -> None:
    """Raise if public and private data share records, or two of them have equal inputs.

    Inputs are compared exactly, as single-precision numbers.
    """
    reason = (
        "a function of public records is released without noise and without a charge, so a record in "
        "both sets has no protection. Split the records before training, equal ones to the same side, "
        "or generate public ones."
    )
    if _share_records(public, private):
        raise DataError(f"the public data is the private data itself, or a part of it: {reason}")
    names = set(_input_names(public))
    if any(name in names for name in _input_names(private)):
        raise DataError(f"private records have the same inputs as public ones: {reason}")


def check_distinct(data: Data) -> None:
    """Raise if a record is in several slots: repeated numbers in a subset, or concatenated data sets.

    Args:
        data: Private records, of which each slot is a unit of privacy.
    """
    repeated = any(
        holder.rows is not None and len(np.unique(holder.rows)) < len(holder.rows)
        for holder in _holders(data)
    )
    whole = data.dataset if isinstance(data, Source) else data
    parts = whole.datasets if isinstance(whole, ConcatDataset) else []
    if repeated or any(_share_records(*pair) for pair in combinations(parts, 2)):
        raise DataError(
            "a record is in several slots (numbers repeated in a Subset or a select, or parts of a "
            "concatenated data set that share records): each slot is drawn and clipped by itself, so "
            "that the record would count several times and cost more than is charged. Pass each record "
            "once, and augment it when it is read (or by views=); to bound the records of one person, "
            "pass units=."
        )


def _input_names(data: Data) -> Iterator[bytes]:
    """Hash of each record's input; equal inputs have equal hashes."""
    for indices in torch.arange(count(data)).split(_AT_ONCE):
        parts = [_plain(part) for part in tree_leaves(take(data, indices)[0])]
        for row in range(len(indices)):
            content = b"".join(part[row].tobytes() for part in parts)
            yield hashlib.blake2b(content, digest_size=16).digest()


def _plain(part: Tensor) -> Any:
    """Rows as numpy numbers of one precision, with one zero."""
    dtype = torch.float32 if part.is_floating_point() else torch.int64
    return (part.detach().to("cpu", dtype) + 0).unsqueeze(-1).flatten(1).contiguous().numpy()


@dataclass(frozen=True, eq=False)
class _Holder:
    """Data set or tensor, and the numbers of its rows (None: all)."""

    source: Any
    rows: npt.NDArray[np.int64] | None = None

    def select(self, rows: Sequence[int]) -> "_Holder":
        """Some of the rows."""
        chosen = np.asarray(rows, dtype=np.int64)
        return _Holder(self.source, chosen if self.rows is None else self.rows[chosen])


def _holders(data: Any, depth: int = _DEPTH) -> Iterator[_Holder]:
    """The data set itself, the data sets that it wraps, and the tensors of its inputs.

    A wrapper of another kind holds its attributes that have as many rows.
    """
    if isinstance(data, np.ndarray) and data.dtype.kind in "biuf" and data.flags.writeable:
        data = torch.from_numpy(data.view(data.dtype.newbyteorder("=")))
    if data is None or isinstance(data, (bool, int, float, complex, str, bytes)):
        return  # equal values may be one object
    yield _Holder(data)
    if isinstance(data, Tensor) or depth == 0:
        return
    if isinstance(data, Subset):
        yield from (holder.select(data.indices) for holder in _holders(data.dataset, depth - 1))
    elif isinstance(data, TensorDataset):
        yield _Holder(data.tensors[0])
    elif isinstance(data, ConcatDataset):
        for part in data.datasets:
            yield from _holders(part, depth - 1)
    elif isinstance(data, (tuple, list)):
        for part in leaves(data[:1]):
            yield from _holders(part, depth - 1)
    elif isinstance(data, Source):
        yield from _holders(data.dataset, depth)
    elif hasattr(data, "_indices") and hasattr(getattr(data, "data", None), "table"):
        yield from _arrow_rows(data)
    elif hasattr(data, "__len__") and hasattr(data, "__dict__"):
        for part in vars(data).values():
            if hasattr(part, "__len__") and not isinstance(part, str) and len(part) == len(data):
                yield from _holders(part, depth - 1)


_ARROW = object()


def _arrow_rows(dataset: Any) -> Iterator[_Holder]:
    """Rows of a Hugging Face data set, by addresses in each column's memory, which a select keeps."""
    for column in dataset.data.table.columns:
        chunks = [chunk for chunk in column.chunks if len(chunk)]
        buffers = [[*chunk.buffers(), None][1] for chunk in chunks]
        pairs = list(zip(chunks, buffers, strict=True))
        if pairs and all(each and each.size >= chunk.offset + len(chunk) for chunk, each in pairs):
            rows = [each.address + chunk.offset + np.arange(len(chunk)) for chunk, each in pairs]
            holder, order = _Holder(_ARROW, np.concatenate(rows)), dataset._indices
            yield holder if order is None else holder.select(order.column(0).to_numpy())


def _share_records(first: Any, second: Any) -> bool:
    """Whether two data sets hold a record in common."""
    return any(_overlap(ours, theirs) for ours in _holders(first) for theirs in _holders(second))


def _overlap(first: _Holder, second: _Holder) -> bool:
    """Whether a row of one is a row of the other."""
    if isinstance(first.source, Tensor) and isinstance(second.source, Tensor):
        return len(np.intersect1d(_addresses(first), _addresses(second))) > 0
    if first.source is not second.source:
        return False
    if first.rows is None or second.rows is None:
        return True
    return len(np.intersect1d(first.rows, second.rows)) > 0


def _addresses(holder: _Holder) -> npt.NDArray[np.int64]:
    """Memory addresses of a tensor's rows."""
    tensor: Tensor = holder.source
    if tensor.layout != torch.strided or tensor.numel() == 0 or tensor.is_meta or not tensor.dim():
        return np.zeros(0, dtype=np.int64)
    rows = np.arange(len(tensor)) if holder.rows is None else holder.rows
    return np.asarray(tensor.data_ptr() + rows * tensor.stride(0) * tensor.element_size())
