"""Reading of slots: each record alone, under random numbers of its own, here or in worker processes.

A row does not depend on other records: docs/guarantees/tape.md, 12.
"""

import hashlib
import random
import sysconfig
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate

from hush.core.errors import DataError, HushError
from hush.core.randomness import Stream, fill_state
from hush.core.value import with_article
from hush.training.sources.records import (
    ArrayRecords,
    Columns,
    MapStyle,
    TableRecords,
    columns_of_collated,
    columns_of_record,
    columns_of_table,
    leaves,
    map_leaves,
)

CollateFn = Callable[[list[Any]], Any]
"""Function of a list of records that returns a batch, as for a DataLoader."""

_PREFETCHED = 2
"""Requests that each worker reads ahead."""
_LIBRARIES = (
    "site-packages",
    "dist-packages",
    sysconfig.get_paths()["stdlib"],
    str(Path(__file__).parent),
)
"""Parts of paths of files that are not the user's."""


class Request(NamedTuple):
    """Slots to read, and the key of the step that their random numbers are derived from (secret)."""

    slots: list[int]
    key: bytes | None
    """None: nothing draws for these rows."""


Rows = tuple[Any, Any]
"""Inputs and targets with a row a slot."""
LONGEST = "longest"
"""Value of `pad_to` that pads to the longest record of a physical batch."""


class Unreadable(NamedTuple):
    """Why slots could not be read, without contents of the record; crosses processes as text."""

    reason: str


@dataclass(frozen=True, eq=False)
class Reader:
    """Inputs and targets of requested slots; a `DataLoader` calls it in its workers."""

    records: MapStyle
    collate_fn: CollateFn | None
    inputs: Columns
    targets: Columns
    pad_to: Any
    pad_value: Any
    present: Tensor | None
    template: tuple[Any, Any] | None
    """Row of the first record, with the structure and types of all rows; None: not read yet."""

    @property
    def draws_nothing(self) -> bool:
        """Whether rows are read all at once, by no code of the user's."""
        named = not callable(self.inputs) and not callable(self.targets)
        table = isinstance(self.records, TableRecords) and named
        return self.collate_fn is None and (table or isinstance(self.records, ArrayRecords))

    def __getitems__(self, request: Request) -> Rows | Unreadable:
        """Inputs and targets of the slots; the name is part of the protocol of DataLoader."""
        try:
            if self.draws_nothing:
                return pad(self._rows(request.slots), self.pad_to, self.pad_value)  # type: ignore[no-any-return]
            assert request.key is not None
            rows = []
            with global_randomness() as seed:
                for slot in request.slots:
                    seed(slot_key(request.key, slot))
                    rows.append(self._row(slot))
            for row in rows:
                if self.template is not None and differs(row, self.template) and self.pad_to != LONGEST:
                    raise DataError(
                        "a record has another length than the first one (which are private and not "
                        "shown), and the shapes of a batch must not follow its records. Pass pad_to= a "
                        f'public length, or pad_to="{LONGEST}" for a model that ignores padding.'
                    )
            return stack(rows, self.pad_value)  # type: ignore[no-any-return]
        except HushError as error:
            return Unreadable(str(error))
        except Exception as error:  # its text may hold a private value
            collated = "" if self.collate_fn is None else ", and collate_fn for a batch of each,"
            return Unreadable(
                f"a record could not be read: {_described(error)} (the record and the text of the error "
                "are private and not shown). The step was not charged. Read the records one after "
                f"another{collated} to see the error; a missing record leaves its slot empty (present=)."
            )

    def _rows(self, slots: list[int]) -> tuple[Any, Any]:
        """Rows of arrays, or of a table's named columns; zeros in empty slots."""
        if isinstance(self.records, TableRecords):
            rows = columns_of_table(self.records, slots, self.inputs, self.targets)
        else:
            assert isinstance(self.records, ArrayRecords)
            self._check_no_columns("rows of arrays")
            rows = self.records.rows(slots)
        if self.present is None:
            return rows
        empty = (~self.present[slots]).nonzero().flatten()
        return map_leaves(rows, lambda values: values.index_fill(0, empty.to(values.device), 0))  # type: ignore[no-any-return]

    def _row(self, slot: int) -> tuple[Any, Any]:
        """Row of one slot; zeros if it is empty."""
        if self.template is not None and self.present is not None and not self.present[slot]:
            return map_leaves(self.template, torch.zeros_like)  # type: ignore[no-any-return]
        record = self.records[slot]
        if self.collate_fn is not None:
            rows = self.collate_fn([record])
            if isinstance(rows, Mapping):
                rows = columns_of_collated(rows, self.inputs, self.targets)
            else:
                self._check_no_columns("pairs that the collate function makes")
        elif isinstance(record, Mapping):
            rows = columns_of_record(record, self.inputs, self.targets)
        else:
            self._check_no_columns("no dictionaries")
            rows = _default_row(record)
        return pad(_pair_of_rows(rows), self.pad_to, self.pad_value)  # type: ignore[no-any-return]

    def _check_no_columns(self, records: str) -> None:
        """Raise if columns were chosen of records that have none."""
        if self.inputs is not None or self.targets is not None:
            raise DataError(
                f"inputs= and targets= choose columns by name, and these records are {records}: the "
                "choice would be left out. Leave both out; to change what is read, pass a collate_fn of "
                "[record] that returns (inputs, targets), or do it in forward()."
            )


def slot_key(key: bytes, slot: int) -> bytes:
    """Subkey of one slot's random numbers in one step, independent of the other slots drawn."""
    return _subkey(key, f"slot {slot}")


def _subkey(key: bytes, use: str) -> bytes:
    """Subkey for one purpose (domain separation)."""
    return hashlib.sha256(key + use.encode()).digest()


@contextmanager
def global_randomness() -> Iterator[Callable[[bytes], None]]:
    """Context that restores the global generators of torch (CPU), numpy and Python.

    Yields a function that seeds all three from a key.
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002

    def seed(key: bytes) -> None:
        fill_state(torch.default_generator, Stream(torch.device("cpu"), key))
        np.random.seed(np.frombuffer(_subkey(key, "numpy"), dtype=np.uint32))  # noqa: NPY002
        random.seed(int.from_bytes(_subkey(key, "random"), "little"))

    try:
        yield seed
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def _described(error: Exception) -> str:
    """Type of an error and the line of the user's program that raised it."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(part in frame.filename for part in _LIBRARIES)
    ]
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"


def _pair_of_rows(rows: Any) -> tuple[Any, Any]:
    """Inputs and targets of one collated record; raise unless each tensor has one row."""
    if not isinstance(rows, (tuple, list)) or len(rows) != 2:
        raise DataError(
            "a record of this data set is not a pair (input, target) of tensors but gives "
            f"{type(rows).__name__}: wrap the data set so that item i is such a pair, or pass a "
            "collate_fn that makes one of [record]."
        )
    inputs, targets = (_with_dicts(part) for part in rows)
    for value in leaves((inputs, targets)):
        if not isinstance(value, Tensor):
            raise DataError(
                f"a record holds {with_article(type(value).__name__)} where a tensor is needed. Leave "
                "it out, or turn it into a tensor in the data set or in collate_fn."
            )
        if not value.dim() or len(value) != 1:
            raise DataError(
                "collate_fn gave a tensor whose first dimension is not 1 for one record: it is called "
                "with [record], one record at a time. Return tensors with a row a record."
            )
    if not all(any(True for _ in leaves(part)) for part in (inputs, targets)):
        raise DataError("a record has no input or no target. Return a pair (inputs, targets).")
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets


def _default_row(record: Any) -> Any:
    """Row of one record by torch's default collate function."""
    try:
        return default_collate([record])
    except TypeError:
        raise DataError(
            "a record of this data set is not made of tensors, arrays and numbers (which is private and "
            "not shown). Turn it into tensors there, or pass a collate_fn that makes them of [record]."
        ) from None


def _with_dicts(part: Any) -> Any:
    """The tree with dictionaries for other mappings, as tokenizers return."""
    if isinstance(part, Mapping) and not isinstance(part, dict):
        return {key: _with_dicts(value) for key, value in part.items()}
    return part


def pad(rows: Any, length: Any, value: Any) -> Any:
    """The tree with the second dimension of its tensors padded, or cut, to public lengths.

    Args:
        rows: Tensors with a row a record; those without a second dimension are unchanged.
        length: Length for all tensors, or a tuple or dictionary of lengths for parts of the tree; None:
            unchanged.
        value: Padding value, likewise.
    """
    if length is None or length == LONGEST:
        return rows
    if isinstance(rows, Tensor):
        return _pad_rows(rows, length, value)
    if isinstance(length, dict):
        names = list(rows) if isinstance(rows, dict) else []
        missing = [name for name in length if name not in names]
        if missing:
            parts = f"the parts {', '.join(map(repr, names))}" if names else "no names, but a place each"
            raise DataError(
                f"pad_to has a length for {', '.join(map(repr, missing))}, and records have {parts}. "
                "Name the parts that the collate function, or the data "
                'set, gives; of inputs by name and targets, pad_to=({"words": 128}, None).'
            )
    if isinstance(rows, dict):
        return {key: pad(part, _part(length, key), _part(value, key, 0)) for key, part in rows.items()}
    return type(rows)(
        pad(part, _part(length, place), _part(value, place, 0)) for place, part in enumerate(rows)
    )


def _part(choice: Any, key: Any, otherwise: Any = None) -> Any:
    """Choice for one part of a tree."""
    if isinstance(choice, dict):
        return choice.get(key, otherwise)
    if isinstance(choice, (tuple, list)):
        return choice[key] if isinstance(key, int) and key < len(choice) else otherwise
    return choice


def _pad_rows(rows: Tensor, length: int, value: Any) -> Tensor:
    if rows.dim() < 2 or rows.shape[1] == length:
        return rows
    if rows.shape[1] > length:
        return rows[:, :length]
    filling = rows.new_full((len(rows), length - rows.shape[1], *rows.shape[2:]), value)
    return torch.cat([rows, filling], 1)


def lengthened(rows: Any, value: Any) -> Any:
    """The tree with one more position of padding in tensors that have positions.

    Args:
        rows: Tensors with a row a record.
        value: Padding value, as for `pad`.
    """
    if isinstance(rows, Tensor):
        return rows if rows.dim() < 2 else _pad_rows(rows, rows.shape[1] + 1, value)
    if isinstance(rows, dict):
        return {key: lengthened(part, _part(value, key, 0)) for key, part in rows.items()}
    return type(rows)(lengthened(part, _part(value, place, 0)) for place, part in enumerate(rows))


def differs(row: Any, template: Any) -> bool:
    """Whether the second dimensions of a row and a template differ; raise for any other difference."""
    if isinstance(template, Tensor):
        if (
            isinstance(row, Tensor)
            and row.dtype == template.dtype
            and row.dim() == template.dim()
            and row.shape[2:] == template.shape[2:]
        ):
            return row.shape != template.shape
    elif type(row) is type(template) and len(row) == len(template):
        if not isinstance(template, dict):
            return sum(differs(*parts) for parts in zip(row, template, strict=True)) > 0
        if row.keys() == template.keys():
            return sum(differs(row[key], template[key]) for key in template) > 0
    raise DataError(
        "a record has another structure, type or shape than the first one (which are private and not "
        "shown): only the first dimension of a record is padded. Make all records alike in the data set "
        "or in collate_fn."
    )


def stack(parts: Sequence[Any], value: Any, *, pinned: bool = False) -> Any:
    """Rows of the same structure, one below the other, padded to the longest of them.

    Args:
        parts: Tensors, or trees of them, with a row a record.
        value: Padding value, as for `pad`.
        pinned: Whether the result is in pinned memory.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        if first.dim() > 1:
            longest = max(part.shape[1] for part in parts)
            parts = [_pad_rows(part, longest, value) for part in parts]
        if not pinned:
            return torch.cat(list(parts))
        shape = (sum(map(len, parts)), *parts[0].shape[1:])
        return torch.cat(list(parts), out=torch.empty(shape, dtype=first.dtype, pin_memory=True))
    if isinstance(first, dict):
        return {
            key: stack([part[key] for part in parts], _part(value, key, 0), pinned=pinned)
            for key in first
        }
    return type(first)(
        stack([part[place] for part in parts], _part(value, place, 0), pinned=pinned)
        for place in range(len(first))
    )


class SlotLoader:
    """Physical batches of drawn slots, read ahead by workers of a `DataLoader` that lives as long."""

    def __init__(self, reader: Reader, workers: int, *, pin_memory: bool) -> None:
        """Loader that has read nothing yet.

        Args:
            reader: Reader of slots.
            workers: Number of processes; 0: read in this process.
            pin_memory: Whether to copy batches to pinned memory, if there is a GPU.
        """
        self._reader = reader
        self._workers = workers
        self._pin_memory = pin_memory and torch.cuda.is_available()
        self._at_rest = False
        """Whether the loader has nothing left to read."""
        self._kept: list[DataLoader[Any]] = []
        """The loader. It must not be collected in a cycle: torch waits 5 seconds for each worker whose
        queues may be gone already."""
        weakref.finalize(self, self._kept.clear).atexit = False  # torch ends them then

    def start(self) -> None:
        """Start the workers now: forks of a process with busy threads may inherit a held lock."""
        if self._workers and not self._at_rest:
            self._kept[:] = [self._make()]
            next(iter(self._kept[0]), None)  # of no requests
            self._at_rest = True

    def stop(self) -> None:
        """End the workers now, before cycles are collected."""
        self._at_rest = False
        self._kept.clear()

    def read(self, parts: Sequence[Sequence[int]], key: bytes | None) -> Iterator[Rows]:
        """Rows of each physical batch.

        Args:
            parts: Slots of each physical batch, at least one batch.
            key: Key of the step, for the records' random numbers.
        """
        pieces = -(-self._workers // len(parts))  # all workers have something to read
        requests = [[Request(list(piece), key) for piece in _split(part, pieces)] for part in parts]
        # a loader that was left unfinished is replaced
        if not self._at_rest:
            self._kept[:] = [self._make()]
        self._at_rest = False
        (loader,) = self._kept
        loader.batch_sampler.requests = [request for part in requests for request in part]  # type: ignore
        batches = iter(loader)
        for part in requests:
            rows = [_next(batches) for _ in part]
            if len(rows) == 1:
                yield rows[0]
                continue
            yield stack(rows, self._reader.pad_value, pinned=self._pin_memory)
        next(batches, None)  # the loader reaches the end, and its workers wait for more
        self._kept[:] = [loader]  # another list may have begun meanwhile
        self._at_rest = True

    def _make(self) -> "DataLoader[Any]":
        return DataLoader(
            self._reader,  # type: ignore[arg-type]
            batch_sampler=_Requests(),  # type: ignore[arg-type]
            collate_fn=_unchanged,
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
            prefetch_factor=_PREFETCHED if self._workers else None,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # so that the program's own does not move
        )


class _Requests:
    """Requests of the current step; DataLoader iterates over them once per step."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)


def _unchanged(rows: Any) -> Any:
    return rows


def _next(batches: Iterator[Any]) -> Rows:
    """Next rows of a loader; raise if they could not be read, or a worker died."""
    try:
        rows = next(batches)
    except RuntimeError as error:  # of the loader: an error of a data set comes as `Unreadable`
        raise DataError(
            f"records could not be read, as a worker process failed ({error}); the step was not "
            "charged. Workers are killed if memory runs out: pass fewer, or workers=0 to read in this "
            "process."
        ) from None
    return checked(rows)


def _split(slots: Sequence[int], pieces: int) -> list[Sequence[int]]:
    """Slots in at most `pieces` runs of equal length."""
    length = max(1, -(-len(slots) // max(1, pieces)))
    return [slots[start : start + length] for start in range(0, len(slots), length)]


def checked(rows: Rows | Unreadable) -> Rows:
    """The rows; raise if they could not be read."""
    if isinstance(rows, Unreadable):
        raise DataError(rows.reason)
    inputs, targets = rows  # torch's pinning turns tuples into lists
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets
