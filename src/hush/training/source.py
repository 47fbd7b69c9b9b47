"""Private data sets, read one physical batch at a time."""

import copy
import hashlib
import random
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from hush.schema import Column
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
from hush.training.tables import EncodedTable, open_table

CollateFn = Callable[[list[Any]], Any]
"""Function from a list of records to a batch, as in a DataLoader."""

_LIBRARIES = "site-packages", "dist-packages", get_paths()["stdlib"], str(Path(__file__).parent)
"""Parts of paths that identify library files."""

Rows = tuple[Any, Any]
"""Inputs and targets, one row per slot."""


@dataclass(frozen=True, eq=False, repr=False)
class Source:
    """Private data set, and options to convert its records to inputs and targets.

    Memory contains only the current physical batch, and two physical batches per worker.

    **Guarantee.** Each record is read and collated separately, so its row depends only on the record,
    public options and separate random numbers. This assumes that item i of the data set does not depend
    on earlier reads: docs/guarantees/tape.md, 12. `pad_to="longest"` also assumes that the model ignores
    padding, and the guarantee has `arithmetic: assumed`.

    Args:
        dataset: Map-style data set (of torch or Hugging Face), pandas DataFrame, or a pair of arrays
            (including numpy.memmap) or tensors.
        collate_fn: Function from a list of records to a batch, as in a DataLoader; it is called with one
            record at a time.
        workers: Number of worker processes; 0 to read in this process.
        inputs: Input columns, for records that are dictionaries or table rows: a name, a list of names
            (stacked as a vector), a dictionary from argument names to columns, or a function of the
            record. By default, all other columns are passed as keyword arguments.
        targets: Target columns, in the same form. With `collate_fn`, columns are selected from its
            result.
        pad_to: Public length to which the first dimension of a record is padded or cut; or a tuple
            (inputs, targets) or dictionaries of lengths (None: unchanged). "longest": pad to the longest
            record of a physical batch, for a model and a loss that ignore padding (tested on synthetic
            records). By default, all records must have the same length.
        pad_value: Padding value, or padding values in the same structure.
        present: Mask of non-empty slots, as in `step.batches`; empty slots are not read.
        schema: Public declaration of the columns (`hush.schema`) of a DataFrame, or of a file given by
            its path (CSV, JSON lines, Parquet, `.npz`, a folder of images). Rows are encoded when they
            are read. `targets` names the target columns, and all other columns are inputs.

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
    schema: Mapping[str, Column] | None = None

    def __post_init__(self) -> None:
        if self.schema is not None and not isinstance(self.dataset, EncodedTable):
            if self.collate_fn is not None or self.inputs is not None or not self.targets:
                raise InvalidValue(
                    "schema= needs targets=, and declares the inputs. Leave out inputs= and "
                    "collate_fn=, and declare other columns as Ignored().",
                    key="schema",
                )
            names = [self.targets] if isinstance(self.targets, str) else list(self.targets)  # type: ignore
            encoded = EncodedTable(open_table(self.dataset), self.schema, names)
            object.__setattr__(self, "dataset", encoded)
            object.__setattr__(self, "targets", None)
        check_count("workers", self.workers, "it is a number of processes", example=4)
        for length in leaves(self.pad_to):
            if isinstance(length, str) and self.pad_to != LONGEST:
                text = f'pad_to={self.pad_to!r} is not a length. Pass a public number, or "{LONGEST}".'
                raise InvalidValue(text, key="pad_to")
            if length is not None and not self.ragged:
                check_count("pad_to", length, "it is the padded length of every record", at_least=1)
        present = check_present(self.present, len(self))
        # move the mask to the CPU, because forked workers must not use a GPU
        object.__setattr__(self, "present", None if present is None else present.cpu())

    @cached_property
    def _records(self) -> MapStyle:
        return numbered(self.dataset)

    def __len__(self) -> int:
        """Number of slots."""
        return len(self._records)

    def __getitem__(self, slot: int) -> tuple[Any, Any]:
        """Inputs and targets of one slot, read without seeding the global generators."""
        inputs, targets = map_leaves(self.take([slot]), lambda rows: rows[0])
        return inputs, targets

    @property
    def ragged(self) -> bool:
        """Whether shapes depend on the records (`pad_to="longest"`)."""
        return isinstance(self.pad_to, str)

    def take(self, slots: list[int], key: bytes | None = None) -> Rows:
        """Inputs and targets of these slots.

        Args:
            slots: Slot numbers.
            key: Key of the random numbers of each record; None for the global generators.
        """
        return _checked(self._read(slots, self._key(key), self._template))

    def batches(self, parts: Sequence[Tensor], key: bytes | None) -> Iterator[Rows]:
        """Iterate over physical batches of inputs and targets; workers read ahead.

        Args:
            parts: Slots of each physical batch.
            key: Key of the random numbers of each record; None for the global generators.
        """
        if parts:  # a rank may have no records
            yield from self.loader.read(parts, self._key(key))

    @cached_property
    def _arrays(self) -> ArrayRecords | EncodedTable | None:
        """Arrays or table columns that are read without user code; None if records are read
        separately."""
        records = self._records
        if isinstance(records, EncodedTable):
            return records
        if self.collate_fn is not None or callable(self.inputs) or callable(self.targets):
            return None
        if isinstance(records, TableRecords):
            return records.arrays(self.inputs, self.targets)
        named = self.inputs is not None or self.targets is not None
        return None if named or not isinstance(records, ArrayRecords) else records

    @cached_property
    def _template(self) -> Rows | None:
        """Row of the first non-empty slot, which determines structure, types and shapes."""
        if self._arrays is not None:
            return None
        filled = [] if self.present is None else self.present.nonzero().flatten().tolist()
        rows = _checked(self._read(filled[:1] or [0], bytes(32), None))
        for part in leaves(rows):
            check_numbers(part)
        return rows

    @cached_property
    def loader(self) -> "SlotLoader":
        """Reader of physical batches, with its workers."""
        return SlotLoader(self)

    def _key(self, key: bytes | None) -> bytes | None:
        """The key, or by default a key that is drawn from the global generator.

        The global generator then advances independently of the number of draws per record.
        """
        if key is not None or self._arrays is not None:
            return key
        return bytes(torch.randint(256, (32,)).tolist())

    def _read(self, slots: list[int], key: bytes | None, template: Rows | None) -> Rows | str:
        """Read the rows of these slots, separately and with separate random numbers.

        Returns:
            The rows, or the reason of a failure, which does not show the record. It is returned because
            worker processes do not preserve error messages.
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
        except Exception as error:  # its text may contain a private value
            frames = traceback.extract_tb(error.__traceback__)
            own = [each for each in frames if not any(part in each.filename for part in _LIBRARIES)]
            place = f" in {Path(own[-1].filename).name}, line {own[-1].lineno}" if own else ""
            return (
                f"a record could not be read: {type(error).__name__}{place} (the record and the "
                "error text are private and not shown). The step was not charged. Read and collate the "
                "records one by one to see the error; exclude a missing record by present=."
            )


@contextmanager
def global_randomness() -> Iterator[Callable[[bytes], None]]:
    """Context that restores the generators of torch (CPU), NumPy and Python; yields a function that
    seeds them."""
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
    """Return the rows; raise if there is the reason of a failure instead."""
    if isinstance(rows, str):
        raise DataError(rows)
    inputs, targets = rows
    # pin_memory converts a tuple to a list
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets


class SlotLoader:
    """Reader of physical batches; the workers of a `DataLoader` read ahead."""

    def __init__(self, source: Source) -> None:
        self._slots = _Slots(source)
        self._workers, self._pad_value = source.workers, source.pad_value
        self._pin_memory = torch.cuda.is_initialized()  # the model may be on a GPU
        self._at_rest = False
        """Whether the loader has no pending request."""
        self._kept: list[DataLoader[Any]] = []
        """The loader, stored outside of reference cycles. Otherwise garbage collection could close the
        queues of a worker first, and torch would wait 5 seconds for the worker."""
        weakref.finalize(self, self._kept.clear).atexit = False  # torch stops the workers at exit

    def start(self) -> None:
        """Start the workers before other threads run, because a fork may inherit a locked lock."""
        if self._workers and not self._at_rest:
            next(iter(self._renewed()), None)  # starts the workers; there are no requests
            self._at_rest = True

    def stop(self) -> None:
        """Stop the workers, without waiting for garbage collection."""
        self._at_rest = False
        self._kept.clear()

    def read(self, parts: Sequence[Tensor], key: bytes | None) -> Iterator[Rows]:
        """Read the rows of each physical batch; `parts` must not be empty."""
        number = max(1, -(-self._workers // len(parts)))  # enough requests for all workers
        # replace a loader with pending requests
        loader = self._kept[0] if self._at_rest else self._renewed()
        self._at_rest = False
        requests = [[(piece.tolist(), key) for piece in part.chunk(number)] for part in parts]
        loader.batch_sampler[:] = [request for pieces in requests for request in pieces]  # type: ignore
        batches = iter(loader)
        for pieces in requests:
            try:
                rows = [_checked(next(batches)) for _ in pieces]
            except (
                RuntimeError
            ) as error:  # raised by the loader; errors of a data set are returned as reasons
                raise DataError(
                    f"records could not be read, because a worker process failed ({error}). The step "
                    "was not charged. If memory ran out, pass fewer workers, or workers=0."
                ) from None
            yield rows[0] if len(rows) == 1 else stack(rows, self._pad_value, pinned=self._pin_memory)
        next(batches, None)  # exhaust the loader; its workers then wait for new requests
        self._kept[:] = [loader]  # another read may have replaced it
        self._at_rest = True

    def _renewed(self) -> "DataLoader[Any]":
        """Create a loader with new workers."""
        loader: DataLoader[Any] = DataLoader(
            self._slots,  # type: ignore[arg-type]
            batch_sampler=[],
            collate_fn=copy.copy,  # keeps tuples and strings unchanged
            num_workers=self._workers,
            persistent_workers=self._workers > 0,
            prefetch_factor=2 if self._workers else None,
            pin_memory=self._pin_memory,
            generator=torch.Generator(),  # keeps the state of the global generator
        )
        self._kept[:] = [loader]
        return loader


class _Slots:
    """Data set of a `DataLoader` that reads the requests of the current step."""

    def __init__(self, source: Source) -> None:
        # read the template once, and copy the source without its loader, which cannot be pickled
        self._template, self._source = source._template, copy.copy(source)

    def __getitems__(self, request: tuple[list[int], bytes | None]) -> Rows | str:
        """Rows of a request; `DataLoader` calls this method by its name."""
        return self._source._read(*request, self._template)
