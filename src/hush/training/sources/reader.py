"""Reading of slots: each record under random numbers of its own, in this process or in a worker."""

import hashlib
import random
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hush.core.errors import DataError, HushError
from hush.core.randomness import Stream, fill_state
from hush.training.sources.columns import (
    Columns,
    columns_of_collated,
    columns_of_record,
    columns_of_table,
)
from hush.training.sources.records import ArrayRecords, MapStyle, TableRecords, map_leaves
from hush.training.sources.rows import (
    OTHER_SHAPE,
    blank,
    default_row,
    pad,
    pair_of_rows,
    same_kind,
    stack,
)

_LIBRARIES = (
    "site-packages",
    "dist-packages",
    sysconfig.get_paths()["stdlib"],
    str(Path(__file__).parent),
)
"""Parts of paths of files that a user has not written."""

CollateFn = Callable[[list[Any]], Any]
"""A list of records to a batch of them, as DataLoader has it."""


@dataclass(frozen=True)
class Request:
    """Slots to read, and the key of the step that their random numbers are derived from (secret)."""

    slots: list[int]
    key: bytes | None
    """None: of rows that nothing draws for."""


@dataclass(frozen=True)
class Unreadable:
    """Why slots could not be read, without anything of the record: text that crosses processes."""

    reason: str


@dataclass(frozen=True, eq=False)
class Reader:
    """Inputs and targets of requested slots: what runs in a worker process."""

    records: MapStyle
    collate_fn: CollateFn | None
    inputs: Columns
    targets: Columns
    pad_to: Any
    pad_value: Any
    present: Tensor | None
    template: tuple[Any, Any] | None
    """Rows of one record, whose shapes and types all have; None: it is yet to be read."""

    @property
    def draws_nothing(self) -> bool:
        """Whether records are rows that are read all at once, by no code of the user's."""
        named = not callable(self.inputs) and not callable(self.targets)
        table = isinstance(self.records, TableRecords) and named
        return self.collate_fn is None and (table or isinstance(self.records, ArrayRecords))

    def __getitems__(self, request: Request) -> "tuple[Any, Any] | Unreadable":
        """Inputs and targets of the slots, a row each; the name is what DataLoader asks for."""
        try:
            if self.draws_nothing:
                return pad(self._rows(request.slots), self.pad_to, self.pad_value)  # type: ignore[no-any-return]
            assert request.key is not None
            rows = []
            with global_randomness() as seed:
                for slot in request.slots:
                    seed(slot_key(request.key, slot))
                    rows.append(self._row(slot))
            inputs, targets = stack(rows)
        except HushError as error:
            return Unreadable(str(error))
        except Exception as error:  # whatever a data set raises: its text may hold a private value
            collated = (
                "" if self.collate_fn is None else ", and the collate function for a batch of each,"
            )
            return Unreadable(
                f"a record could not be read: {_described(error)} (which record, and what the error "
                "says, is private and not shown). The step was not charged. Ask the data set for its "
                f"records one after another{collated} to see the error; a record that is missing leaves "
                "its slot empty (present=)."
            )
        return inputs, targets

    def _rows(self, slots: list[int]) -> tuple[Any, Any]:
        """Rows of arrays, or of a table's named columns."""
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
        """Row of one slot; one that is empty is not read."""
        if self.template is not None and self.present is not None and not self.present[slot]:
            return blank(self.template)  # type: ignore[no-any-return]
        row: tuple[Any, Any] = pad(self._collated(self.records[slot]), self.pad_to, self.pad_value)
        if self.template is not None and not same_kind(row, self.template):
            raise DataError(OTHER_SHAPE)
        return row

    def _collated(self, record: Any) -> tuple[Any, Any]:
        """One record as a pair of rows."""
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
            rows = default_row(record)
        return pair_of_rows(rows)

    def _check_no_columns(self, records: str) -> None:
        """Raise where columns were chosen of records that have none: the choice would be left out."""
        if self.inputs is not None or self.targets is not None:
            raise DataError(
                f"inputs= and targets= choose columns by name, and these records are {records}, which "
                "have none: the choice, or a function that was passed, would be left out. Leave both "
                "out; to change what is read, pass a collate_fn of [record] that returns (inputs, "
                "targets), or do it in forward()."
            )


def slot_key(key: bytes, slot: int) -> bytes:
    """Key of one slot's random numbers in one step, whoever else is drawn."""
    return _derived(key, f"slot {slot}")


def _derived(key: bytes, use: str) -> bytes:
    """Key for one use of another key."""
    return hashlib.sha256(key + use.encode()).digest()


@contextmanager
def global_randomness() -> Iterator[Callable[[bytes], None]]:
    """Context after which the global generators of torch (CPU), numpy and Python are as they were.

    Yields a function that seeds all three from a key, each with all of its bits.
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002

    def seed(key: bytes) -> None:
        fill_state(torch.default_generator, Stream(torch.device("cpu"), key))
        np.random.seed(np.frombuffer(_derived(key, "numpy"), dtype=np.uint32))  # noqa: NPY002
        random.seed(int.from_bytes(_derived(key, "random"), "little"))

    try:
        yield seed
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])


def _described(error: Exception) -> str:
    """Kind of an error and the line of the program that it came from, which are code and not data."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not any(part in frame.filename for part in _LIBRARIES)
    ]
    place = f" in {Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{place}"
