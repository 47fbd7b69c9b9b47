"""Stored private records, read one physical batch at a time."""

import copy
import hashlib
import random
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from sysconfig import get_paths
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hush.core.errors import DataError, HushError, InvalidValue
from hush.core.randomness import Stream, fill_state
from hush.core.value import check_count
from hush.training.records import (
    LONGEST,
    ArrayRecords,
    Columns,
    MapStyle,
    TableRecords,
    check_alike,
    check_numbers,
    check_present,
    leaves,
    map_leaves,
    numbered,
    pad,
    row_of,
    stack,
)

CollateFn = Callable[[list[Any]], Any]
"""Function of a list of records that returns a batch, as for a DataLoader."""

_LIBRARIES = "site-packages", "dist-packages", get_paths()["stdlib"], str(Path(__file__).parent)
"""Parts of paths of files that are not the user's."""

Rows = tuple[Any, Any]
"""Inputs and targets with a row a slot."""


@dataclass(frozen=True, eq=False, repr=False)
class Source:
    """Stored private records, and their conversion to inputs and targets.

    Only the current physical batches are in memory: two per worker, and the one that is processed.

    **Guarantee.** A record's row is a function of the record, of public options and of random numbers
    of its own: it is read and collated alone. Assumes that the data set's item i does not depend on
    earlier reads: docs/guarantees/tape.md, 12. With `pad_to="longest"`, it also assumes that the
    model ignores padding: `arithmetic: assumed`.

    Args:
        dataset: map-style data set (of torch, or of Hugging Face), pandas DataFrame, or a pair of
            arrays (also numpy.memmap) or tensors.
        collate_fn: function that makes a batch of a list of records, as for a DataLoader; called with
            one record at a time.
        workers: number of processes that read ahead; 0: read in this process.
        inputs: columns of records that are dictionaries or rows of a table: a name, a list of names (one
            vector of numbers), a dictionary of arguments by name, or a function of the record. None: all
            other columns, as arguments by name.
        targets: columns of the targets, likewise. Both refer to a dictionary that `collate_fn` returns.
        pad_to: public length that a record's first dimension is padded or cut to, in all tensors that
            have one; or a tuple (inputs, targets), or dictionaries by name, of lengths and None.
            "longest": the longest record of a physical batch, for a model and a loss that ignore padding
            (tested on synthetic records). None: all records have one length.
        pad_value: number to pad with, likewise.
        present: mask of the slots that hold a record, as in `step.batches`; an empty one is not read.

    Example:
        source = hush.Source(dataset, collate_fn=pad_and_mask, pad_to=128, workers=4)
        for batch in step.batches(source, steps=100):
            step(batch)
    """

    dataset: Any
    _: KW_ONLY
    collate_fn: CollateFn | None = None
    workers: int = 0
    inputs: Columns = None
    targets: Columns = None
    pad_to: Any = None
    pad_value: Any = 0
    present: Tensor | None = None

    def __post_init__(self) -> None:
        check_count("workers", self.workers, "they are processes that read records", example=4)
        for length in leaves(self.pad_to):
            if isinstance(length, str) and self.pad_to != LONGEST:
                text = f'pad_to={self.pad_to!r} is no length. Pass a public number, or "{LONGEST}".'
                raise InvalidValue(text, key="pad_to")
            if length is not None and not self.ragged:
                check_count("pad_to", length, "it is the public length of every record", at_least=1)
        present = check_present(self.present, len(self))
        # workers of a fork may not touch a GPU
        object.__setattr__(self, "present", None if present is None else present.cpu())

    @cached_property
    def _records(self) -> MapStyle:
        return numbered(self.dataset)

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._records)

    def __getitem__(self, slot: int) -> tuple[Any, Any]:
        """Inputs and targets of one slot, under random numbers of the program's."""
        inputs, targets = map_leaves(self.take([slot]), lambda rows: rows[0])
        return inputs, targets

    @property
    def ragged(self) -> bool:
        """Whether shapes depend on the records: a public option."""
        return isinstance(self.pad_to, str)

    def take(self, slots: list[int], key: bytes | None = None) -> Rows:
        """Inputs and targets of some slots.

        Args:
            slots: their numbers.
            key: key of the records' random numbers; None: the program's own.
        """
        return _checked(self._read(slots, self._key(key), self._template))

    def batches(self, parts: Sequence[Tensor], key: bytes | None) -> Iterator[Rows]:
        """Inputs and targets of physical batches, read ahead by the workers.

        Args:
            parts: slots of each physical batch.
            key: as for `take`.
        """
        if parts:  # a rank's own part may have no record to read shapes from
            yield from self.loader.read(parts, self._key(key))

    @cached_property
    def _arrays(self) -> ArrayRecords | None:
        """Rows of arrays or of a table, read by no code of the user's; None: records are read alone."""
        records = self._records
        if self.collate_fn is not None or callable(self.inputs) or callable(self.targets):
            return None
        if isinstance(records, TableRecords):
            return records.arrays(self.inputs, self.targets)
        named = self.inputs is not None or self.targets is not None
        return None if named or not isinstance(records, ArrayRecords) else records

    @cached_property
    def _template(self) -> Rows | None:
        """Row of the first slot that holds a record: structure, types and shapes of all rows."""
        if self._arrays is not None:
            return None
        filled = [] if self.present is None else self.present.nonzero().flatten().tolist()
        rows = _checked(self._read(filled[:1] or [0], bytes(32), None))
        for part in leaves(rows):
            check_numbers(part)
        return rows

    @cached_property
    def loader(self) -> "SlotLoader":
        """Reader of physical batches, and its workers."""
        return SlotLoader(self)

    def _key(self, key: bytes | None) -> bytes | None:
        """The key, or one of the program's randomness, which advances alike for any draws of records."""
        if key is not None or self._arrays is not None:
            return key
        return bytes(torch.randint(256, (32,)).tolist())

    def _read(self, slots: list[int], key: bytes | None, template: Rows | None) -> Rows | str:
        """Rows of some slots, each read alone under its own random numbers; or the reason of a failure.

        A reason has no contents of the record. It is returned, as errors lose their text in a worker.
        """
        try:
            if self._arrays is not None:
                both = self._arrays.rows(slots)
                if self.present is not None:
                    empty = (~self.present[slots]).nonzero().flatten()
                    both = map_leaves(both, lambda rows: rows.index_fill(0, empty.to(rows.device), 0))
                return pad(both, self.pad_to, self.pad_value)  # type: ignore[no-any-return]
            assert key is not None
            rows = []
            with global_randomness() as seed:
                for slot in slots:
                    if template is not None and self.present is not None and not self.present[slot]:
                        rows.append(map_leaves(template, torch.zeros_like))
                        continue
                    seed(_subkey(key, f"slot {slot}"))
                    row = row_of(self._records[slot], self.collate_fn, self.inputs, self.targets)
                    rows.append(pad(row, self.pad_to, self.pad_value))
            for row in rows if template is not None else ():
                check_alike(row, template, any_length=self.ragged)
            return stack(rows, self.pad_value)  # type: ignore[no-any-return]
        except HushError as error:
            return str(error)
        except Exception as error:  # its text may hold a private value
            frames = traceback.extract_tb(error.__traceback__)
            own = [each for each in frames if not any(part in each.filename for part in _LIBRARIES)]
            place = f" in {Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
            return (
                f"a record could not be read: {type(error).__name__}{place} (it and the text of the "
                "error are private and not shown). The step was not charged. Read and collate the "
                "records one by one to see the error; a missing record leaves its slot empty (present=)."
            )


@contextmanager
def global_randomness() -> Iterator[Callable[[bytes], None]]:
    """Context that restores the generators of torch (CPU), numpy and Python; yields their seeding."""
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


def _subkey(key: bytes, use: str) -> bytes:
    """Subkey for one purpose (domain separation), e.g. the random numbers of one slot in one step."""
    return hashlib.sha256(key + use.encode()).digest()


def _checked(rows: Rows | str) -> Rows:
    """The rows; raise the reason if they could not be read."""
    if isinstance(rows, str):
        raise DataError(rows)
    inputs, targets = rows
    # torch's pinning turns a tuple into a list
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets


class SlotLoader:
    """Reader of physical batches of drawn slots, ahead of time by workers of one `DataLoader`."""

    def __init__(self, source: Source) -> None:
        self._slots = _Slots(source)
        self._workers, self._pad_value = source.workers, source.pad_value
        self._pin_memory = torch.cuda.is_initialized()  # the model may be on a GPU
        self._at_rest = False
        """Whether the loader has nothing left to read."""
        self._kept: list[DataLoader[Any]] = []
        """The loader, outside of any cycle: torch waits 5 seconds for each worker whose queues a
        collection may have ended."""
        weakref.finalize(self, self._kept.clear).atexit = False  # torch ends them then

    def start(self) -> None:
        """Start the workers now: forks of a process with busy threads may inherit a held lock."""
        if self._workers and not self._at_rest:
            next(iter(self._renewed()), None)  # of no requests
            self._at_rest = True

    def stop(self) -> None:
        """End the workers now, before cycles are collected."""
        self._at_rest = False
        self._kept.clear()

    def read(self, parts: Sequence[Tensor], key: bytes | None) -> Iterator[Rows]:
        """Rows of each physical batch, at least one."""
        number = max(1, -(-self._workers // len(parts)))  # all workers have something to read
        # a loader that was left unfinished is replaced
        loader = self._kept[0] if self._at_rest else self._renewed()
        self._at_rest = False
        requests = [[(piece.tolist(), key) for piece in part.chunk(number)] for part in parts]
        loader.batch_sampler[:] = [request for pieces in requests for request in pieces]  # type: ignore
        batches = iter(loader)
        for pieces in requests:
            try:
                rows = [_checked(next(batches)) for _ in pieces]
            except RuntimeError as error:  # of the loader: an error of a data set comes as a reason
                raise DataError(
                    f"records could not be read, as a worker process failed ({error}); the step was not "
                    "charged. If memory ran out, pass fewer workers, or workers=0."
                ) from None
            yield rows[0] if len(rows) == 1 else stack(rows, self._pad_value, pinned=self._pin_memory)
        next(batches, None)  # the loader reaches the end, and its workers wait for more
        self._kept[:] = [loader]  # another list may have begun meanwhile
        self._at_rest = True

    def _renewed(self) -> "DataLoader[Any]":
        """New loader with new workers."""
        loader: DataLoader[Any] = DataLoader(
            self._slots,  # type: ignore[arg-type]
            batch_sampler=[],
            collate_fn=copy.copy,  # of tuples and strings: unchanged
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
            prefetch_factor=2 if self._workers else None,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # the program's own does not move
        )
        self._kept[:] = [loader]
        return loader


class _Slots:
    """Data set of a `DataLoader` that reads the requests of the current step."""

    def __init__(self, source: Source) -> None:
        # read here, once; without the loader, which does not cross processes
        self._template, self._source = source._template, copy.copy(source)

    def __getitems__(self, request: tuple[list[int], bytes | None]) -> Rows | str:
        """Rows of a request; the name is part of the protocol of `DataLoader`."""
        return self._source._read(*request, self._template)
