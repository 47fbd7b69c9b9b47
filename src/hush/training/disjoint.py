"""Checks that no record is in several slots or in several data sets.

A record is identified by its data set and index, or by the memory address of its input. Copies of a
record are detected only between public and private data. The checks run before any release.
"""

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, product
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hush.core.errors import DataError
from hush.gradients.tree import tree_leaves
from hush.training.data import Data, count, take
from hush.training.records import MapStyle, leaves
from hush.training.source import Source, global_randomness

_AT_ONCE = 512
_DEPTH = 4
"""Maximum nesting depth of searched data sets."""
_PROBED, _READS = 4, 6
"""Number of items that are read by `check_alone`, and number of reads per item."""
_LIBRARIES = {"torch", "datasets", "pandas", "numpy", "hush"}
"""Packages with data sets that read one record per item."""

_MEMORY = object()
"""Marker for rows that are identified by their memory addresses."""

Rows = tuple[Any, npt.NDArray[np.int64] | None]
"""Data set or `_MEMORY`, and row numbers or addresses (None: all rows)."""


def check_held_out(evaluation: Data, data: Data) -> None:
    """Raise if the evaluation data shares records with the private data."""
    if _share_records(evaluation, data):
        raise DataError(
            "the evaluation data shares records with the training data, and evaluation is not "
            "accounted for. Pass other records, which need no protection."
        )


def check_public(public: Data, private: Data) -> None:
    """Raise if public and private data share records, or inputs (compared in single precision)."""
    problem = ""
    if _share_records(public, private):
        problem = "the public data is the private data, or a part of it"
    elif not set(_input_names(public)).isdisjoint(_input_names(private)):
        problem = "some private records have the same inputs as public ones"
    if problem:
        raise DataError(
            f"{problem}: functions of public records are released without noise and without a charge to "
            "the ledger. Split the records before training, with all copies of a record on the same "
            "side, or generate synthetic public records."
        )


def check_distinct(data: Data) -> None:
    """Raise if a record is in several slots: repeated indices, or overlapping concatenated data sets."""
    repeated = any(rows is not None and len(np.unique(rows)) < len(rows) for _, rows in _holders(data))
    whole = data.dataset if isinstance(data, Source) else data
    parts = whole.datasets if isinstance(whole, ConcatDataset) else []
    if repeated or any(_share_records(*pair) for pair in combinations(parts, 2)):
        raise DataError(
            "a record is in several slots (repeated indices, or overlapping parts of a concatenated "
            "data set), and each slot is clipped separately: its privacy cost would exceed the charge. "
            "Pass each record once, and augment it when it is read or by views=; to protect several "
            "records of one person, pass units=."
        )


def check_alone(source: Source) -> None:
    """Raise if an item of a data set depends on several records, as in mixup, cutmix or mosaics.

    The check reads a few items several times with different random seeds. It uses a copy of the data set
    whose containers (with one row per record) report the rows that are read. Containers with no
    read of the item's own row, such as public images, are ignored. Reads of files, and of containers
    with another length, are not detected.
    """
    for dataset, rows in _holders(source.dataset):
        library = type(dataset).__module__.partition(".")[0] in _LIBRARIES
        if library or not isinstance(dataset, MapStyle) or not hasattr(dataset, "__dict__"):
            continue
        numbers = np.arange(len(dataset)) if rows is None else rows
        if source.present is not None:  # empty slots are not read
            numbers = numbers[source.present.numpy()] if len(numbers) == len(source) else numbers[:0]
        for place in np.linspace(0, len(numbers) - 1, min(_PROBED, len(numbers))).astype(int):
            reads = _reads(dataset, int(numbers[place]))
            own = {name for name, rows in reads.items() if rows and set.intersection(*rows)}
            # if no container has a row common to all reads, the data set reads random rows
            counted = reads if own == {"self"} else own
            mixed = [name for name in counted if reads[name] and len(set.union(*reads[name])) > 1]
            if mixed:
                raise DataError(
                    f"item i of {type(dataset).__name__} reads several rows of {min(mixed)}, as mixup "
                    "and mosaics do: a record would affect the gradients of other records, which "
                    "clipping does not bound. Mix views of one record, or mix a record with public "
                    "records."
                )


def _reads(dataset: Any, index: int) -> dict[str, list[set[int]]]:
    """Rows that repeated reads of item `index` access, by name of the container."""
    kind, length = type(dataset), len(dataset)
    reads: dict[str, list[set[int]]] = {"self": []}

    def item(self: Any, index: Any, *others: Any, **named: Any) -> Any:
        _add_reads(reads["self"], index, length)
        return kind.__getitem__(self, index, *others, **named)

    # reading the copy may fail; earlier reads are still reported
    with suppress(Exception), warnings.catch_warnings(), global_randomness() as seed:
        warnings.simplefilter("ignore")
        # the copy must not close the files of the original
        methods = {"__getitem__": item, "__del__": lambda self: None}
        watched: Any = object.__new__(type(kind.__name__, (kind,), methods))
        for name, value in vars(dataset).items():
            indexed = hasattr(value, "__getitem__") and not isinstance(value, Mapping)
            if indexed and _has_rows(value, length):
                value = _Watched(value, reads.setdefault(f"self.{name}", []), length)
            watched.__dict__[name] = value
        for number in range(_READS):
            for rows in reads.values():
                rows.append(set())
            seed(number.to_bytes(32, "little"))
            watched[index]
    return reads


@Sequence.register
class _Watched:
    """Wrapper of a container with one row per record, or of a table's indexer, that logs its reads."""

    def __init__(self, inner: Any, found: list[set[int]], rows: int) -> None:
        self._inner, self._found, self._rows = inner, found, rows

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, index: Any) -> Any:
        _add_reads(self._found, index, self._rows)
        return self._inner[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self._inner[index] = value

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._inner, name)
        return _Watched(part, self._found, self._rows) if name in ("iloc", "iat") else part


def _add_reads(found: list[set[int]], index: Any, rows: int) -> None:
    """Add the rows that an index accesses; a column name accesses no row."""
    first = index[0] if isinstance(index, tuple) and index else index
    if not isinstance(first, str):
        found[-1].update(np.atleast_1d(np.arange(rows)[first]).tolist())


def _input_names(data: Data) -> Iterator[bytes]:
    """Hash of the inputs of each record; equal inputs have equal hashes."""
    for indices in torch.arange(count(data)).split(_AT_ONCE):
        parts = []
        for part in tree_leaves(take(data, indices)[0]):
            dtype = torch.float32 if part.is_floating_point() else torch.int64
            rows = part.detach().to("cpu", dtype) + 0  # maps -0.0 to 0.0
            parts.append(rows.unsqueeze(-1).flatten(1).contiguous().numpy())
        for row in zip(*parts, strict=True):
            yield hashlib.blake2b(b"".join(each.tobytes() for each in row), digest_size=16).digest()


def _holders(data: Any, depth: int = _DEPTH) -> Iterator[Rows]:
    """The data set, the data sets that it wraps, and the tensors and arrays of its inputs.

    The attributes of an unknown wrapper are searched if they have the same number of rows.
    """
    if not hasattr(data, "__getitem__") or isinstance(data, (str, bytes)):
        return  # strings and plain values do not identify records
    if isinstance(data, (Tensor, np.ndarray)):
        start = stride = 0
        if isinstance(data, np.ndarray):
            start, stride = data.ctypes.data, data.strides[0] if data.ndim else 0
        elif data.layout == torch.strided and not data.is_meta and data.ndim:
            start, stride = data.data_ptr(), data.stride(0) * data.element_size()
        if (
            start and 0 not in data.shape and (stride or data.shape[:1] == (1,))
        ):  # excludes an expanded single row
            yield _MEMORY, start + stride * np.arange(len(data))
        return
    yield data, None
    if depth == 0:
        return
    if isinstance(data, Subset):
        chosen = np.asarray(data.indices, dtype=np.int64)
        for held, rows in _holders(data.dataset, depth - 1):
            yield held, chosen if rows is None else rows[chosen]
    elif isinstance(data, ConcatDataset):
        for part in data.datasets:
            yield from _holders(part, depth - 1)
    elif isinstance(data, (TensorDataset, tuple, list)):
        for part in leaves((data.tensors if isinstance(data, TensorDataset) else data)[:1]):
            yield from _holders(part, depth - 1)
    elif isinstance(data, Source):
        yield from _holders(data.dataset, depth)
    elif hasattr(data, "_indices") and hasattr(getattr(data, "data", None), "table"):
        # a Hugging Face data set: select() keeps the memory addresses of columns
        for column in data.data.table.columns:
            pairs = [(chunk, [*chunk.buffers(), None][1]) for chunk in column.chunks if len(chunk)]
            if pairs and all(each and each.size >= part.offset + len(part) for part, each in pairs):
                places = [each.address + part.offset + np.arange(len(part)) for part, each in pairs]
                order = slice(None) if data._indices is None else data._indices.column(0).to_numpy()
                yield _MEMORY, np.concatenate(places)[order]
    elif hasattr(data, "__len__") and hasattr(data, "__dict__"):
        for part in vars(data).values():
            if _has_rows(part, len(data)):
                yield from _holders(part, depth - 1)


def _has_rows(value: Any, rows: int) -> bool:
    """Whether a value is a container of this length."""
    sized = hasattr(value, "__len__") and not isinstance(value, (str, type))
    return sized and getattr(value, "shape", None) != () and len(value) == rows


def _share_records(first: Any, second: Any) -> bool:
    """Whether two data sets have a record in common."""
    return any(
        ours is theirs and (rows is None or others is None or len(np.intersect1d(rows, others)) > 0)
        for (ours, rows), (theirs, others) in product(_holders(first), _holders(second))
    )
