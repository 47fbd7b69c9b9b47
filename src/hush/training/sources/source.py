"""Source of records: a data set, and how its records are read, collated and padded."""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hush.core.errors import DataError, InvalidValue
from hush.core.value import check_count
from hush.training.sources.columns import Columns
from hush.training.sources.loader import SlotLoader
from hush.training.sources.reader import CollateFn, Reader, Request, Unreadable
from hush.training.sources.records import MapStyle, check_present, leaves, map_leaves, numbered

_TRIALS = 4
"""Times that two records are read twice: a flip by a coin of its own is missed once in 256 times."""


@dataclass(frozen=True, eq=False, repr=False)
class Source:
    """Private records as they are kept, and how one becomes inputs and targets.

    For `step.batches` and `hush.train`, which take the data itself too where nothing else is to be said.
    Only the physical batches at hand are in memory: two a worker, and the one that is worked on.

    **Guarantee.** A record's row is a function of that record, of public settings and of random numbers
    of its own: it is read and collated alone, and padded to a public length. Assumes that the data
    set's item i does not depend on what was asked for before: docs/guarantees/tape.md, 12.

    Args:
        dataset: map-style data set (of torch, or of Hugging Face), pandas DataFrame, or a pair of
            arrays (numpy.memmap too) or tensors.
        collate_fn: makes a batch of a list of records, as for a DataLoader; called with one at a time.
        workers: processes that read ahead; 0: this one reads.
        inputs: columns of records that are dictionaries or rows of a table: a name, a list of names (one
            vector of numbers), a dictionary of arguments by name, or a function of the record. None: all
            but those of the targets, as arguments by name.
        targets: columns of the targets, likewise. Where `collate_fn` returns a dictionary, both are of
            that.
        pad_to: length that a record's first dimension is padded or cut to, in all tensors that have one;
            or a tuple (inputs, targets), or dictionaries by name, of lengths and None. It is public.
        pad_value: number to pad with, likewise.
        pin_memory: copy batches to memory from which a GPU reads at once; a step whose model is on one
            sets it.
        present: which slots hold a record, as in `step.batches`; an empty one is not read.

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
    pin_memory: bool = False
    present: Tensor | None = None

    def __post_init__(self) -> None:
        check_count("workers", self.workers, "they are processes that read records", example=4)
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise InvalidValue(
                f"collate_fn={self.collate_fn!r} cannot be called: it is to make a batch of [record]. "
                "Pass a function, or leave it out.",
                key="collate_fn",
            )
        for length in leaves(self.pad_to):
            if length is not None:
                check_count("pad_to", length, "it is the public length of every record", at_least=1)
        check_present(self.present, len(self))

    @cached_property
    def records(self) -> MapStyle:
        """The records by number."""
        return numbered(self.dataset)

    @property
    def draws_nothing(self) -> bool:
        """Whether records are rows of arrays or of a table, which no code of the user's makes."""
        return self._unread.draws_nothing

    @cached_property
    def _slots(self) -> int:
        """Number of slots when it was first asked for."""
        return len(self.records)

    def __len__(self) -> int:
        """Number of slots; raises if the data set has grown or shrunk since it was first asked."""
        if len(self.records) != self._slots:
            raise DataError(
                "the data set has another number of records than when it was passed (under ADD_REMOVE "
                "the numbers are private and not shown): the slots to draw from are fixed for a run, or "
                "a draw would follow who came and went. Pass data that does not change, e.g. a "
                "torch.utils.data.Subset of the records there are now."
            )
        return self._slots

    def __getitem__(self, slot: int) -> tuple[Any, Any]:
        """Inputs and targets of one slot, under random numbers of the program's."""
        inputs, targets = map_leaves(self.take([slot]), lambda rows: rows[0])
        return inputs, targets

    def take(self, slots: list[int], key: bytes | None = None) -> tuple[Any, Any]:
        """Inputs and targets of some slots, a row each, read by this process.

        Args:
            slots: their numbers.
            key: that the records' random numbers are derived from; None: the program's own.
        """
        return _rows_of(self._reader, Request(slots, self._key(key)))

    def batches(self, parts: Sequence[Sequence[int]], key: bytes | None) -> Iterator[tuple[Any, Any]]:
        """Inputs and targets of physical batches, read ahead by the workers.

        Args:
            parts: slots of each physical batch.
            key: as for `take`.
        """
        # nothing drawn, nothing read: a rank's own part may have no record whose shapes could be asked
        return self._loader.read(parts, self._key(key)) if parts else iter(())

    def _key(self, key: bytes | None) -> bytes | None:
        """The key, or one of the program's randomness, which moves by as much whatever a record draws.

        How often a record draws, once for each of its words, say, would stay in the state of the global
        generators, and that is saved with checkpoints of other libraries.
        """
        if key is not None or self.draws_nothing:
            return key
        return bytes(torch.randint(256, (32,)).tolist())

    def start_workers(self) -> None:
        """Start the processes that read ahead; `batches` starts them too, later."""
        self._loader.start()

    def stop_workers(self) -> None:
        """End the processes that read ahead; the next batch starts others."""
        self._loader.stop()

    def check_repeatable(self) -> None:
        """Raise if a record comes out different under the same random numbers, or after another one.

        A resumed run repeats steps under the same noise: with another augmentation of the records, the
        difference of two releases would show them. A row that follows what was read before it holds
        something of other records.
        """
        slots = self._first_filled()
        keys = [bytes([number]) * 32 for number in range(0 if self.draws_nothing else _TRIALS)]
        first = [[self.take([slot], key) for slot in slots] for key in keys]
        second = [[self.take([slot], key) for slot in reversed(slots)][::-1] for key in keys]
        if not all(map(_same_bits, leaves(first), leaves(second))):
            raise DataError(
                "a record came out different when it was read again, after another one and under the "
                "same random numbers: it draws from a generator of its own, or keeps something of what "
                "was read before. A resumed run would release a second update under the same noise, "
                "whose difference to the first shows records; and a row that holds something of "
                "another record is not bounded by clipping that one. Draw from the global generators "
                "(torch.rand, numpy.random.rand, random.random), which are seeded for each record, and "
                "keep nothing between records, in the data set and in collate_fn."
            )

    def _first_filled(self) -> list[int]:
        """The first two slots that hold a record; fewer where there are no more."""
        if self.present is None:
            return list(range(min(2, len(self))))
        return [int(slot) for slot in self.present.nonzero().flatten()[:2]]

    @cached_property
    def _loader(self) -> SlotLoader:
        return SlotLoader(self._reader, self.workers, pin_memory=self.pin_memory)

    @cached_property
    def _unread(self) -> Reader:
        """Reader that has not seen a record."""
        return Reader(
            self.records,
            self.collate_fn,
            self.inputs,
            self.targets,
            self.pad_to,
            self.pad_value,
            None if self.present is None else self.present.cpu(),
            template=None,
        )

    @cached_property
    def _reader(self) -> Reader:
        """Reader that knows the shapes of a record: those of the first slot that holds one."""
        if self.draws_nothing:
            return self._unread
        return replace(
            self._unread,
            template=_rows_of(self._unread, Request(self._first_filled()[:1] or [0], bytes(32))),
        )


def _rows_of(reader: Reader, request: Request) -> tuple[Any, Any]:
    rows = reader.__getitems__(request)
    if isinstance(rows, Unreadable):
        raise DataError(rows.reason)
    return rows


def _same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors have the same numbers, and NaN in the same places."""
    both_nan = first.ne(first) & second.ne(second)
    return bool((first.eq(second) | both_nan).all())
