"""Data as numbered slots of records: sources that are read as they are drawn, and batches of slots."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from hush.core.errors import DataError, InvalidValue
from hush.core.randomness import RandomSource, Stream, fill_state, substream
from hush.core.value import check_count
from hush.gradients.tree import tree_leaves, tree_map
from hush.training.sources.reader import (
    LONGEST,
    CollateFn,
    Reader,
    Request,
    SlotLoader,
    checked,
    lengthened,
)
from hush.training.sources.records import (
    Columns,
    MapStyle,
    check_lengths,
    check_present,
    leaves,
    map_leaves,
    numbered,
)


@dataclass(frozen=True, eq=False, repr=False)
class Source:
    """Private records as they are stored, and how one becomes inputs and targets.

    For `step.batches` and `hush.train`, which also take the data itself. Only the current physical
    batches are in memory: two per worker, and the one that is processed.

    **Guarantee.** A record's row is a function of the record, of public options and of random numbers
    of its own: it is read and collated alone. Assumes that the data set's item i does not depend on
    what was read before: docs/guarantees/tape.md, 12. With `pad_to="longest"`, it also assumes that the
    model ignores padding, and says `arithmetic: assumed`.

    Args:
        dataset: map-style data set (of torch, or of Hugging Face), pandas DataFrame, or a pair of
            arrays (also numpy.memmap) or tensors.
        collate_fn: function that makes a batch of a list of records, as for a DataLoader; called with
            one record at a time.
        workers: number of processes that read ahead; 0: read in this process.
        inputs: columns of records that are dictionaries or rows of a table: a name, a list of names (one
            vector of numbers), a dictionary of arguments by name, or a function of the record. None: all
            but those of the targets, as arguments by name.
        targets: columns of the targets, likewise. If `collate_fn` returns a dictionary, both refer to
            it.
        pad_to: public length that a record's first dimension is padded or cut to, in all tensors that
            have one; or a tuple (inputs, targets), or dictionaries by name, of lengths and None.
            "longest": the longest record of a physical batch, for a model and a loss that ignore padding
            (tested on synthetic records). None: all records have one length.
        pad_value: number to pad with, likewise.
        pin_memory: copy batches to pinned memory; a step whose model is on a GPU sets it.
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
    pin_memory: bool = False
    present: Tensor | None = None

    def __post_init__(self) -> None:
        check_count("workers", self.workers, "they are processes that read records", example=4)
        if self.collate_fn is not None and not callable(self.collate_fn):
            raise InvalidValue(
                f"collate_fn={self.collate_fn!r} cannot be called. Pass a function that makes a batch "
                "of [record], or leave it out.",
                key="collate_fn",
            )
        if isinstance(self.pad_to, str) and self.pad_to != LONGEST:
            raise InvalidValue(
                f'pad_to={self.pad_to!r} is no length. Pass a public number, or "{LONGEST}" for the '
                "longest record of a physical batch.",
                key="pad_to",
            )
        for length in () if self.ragged else leaves(self.pad_to):
            if length is not None:
                check_count("pad_to", length, "it is the public length of every record", at_least=1)
        check_present(self.present, len(self))

    @cached_property
    def _records(self) -> MapStyle:
        return numbered(self.dataset)

    @cached_property
    def _slots(self) -> int:
        return len(self._records)

    def __len__(self) -> int:
        """Number of slots, fixed when it is first read."""
        return self._slots

    def __getitem__(self, slot: int) -> tuple[Any, Any]:
        """Inputs and targets of one slot, under random numbers of the program's."""
        inputs, targets = map_leaves(self.take([slot]), lambda rows: rows[0])
        return inputs, targets

    @property
    def draws_nothing(self) -> bool:
        """Whether records are rows of arrays or of a table, read by no code of the user's."""
        return self._unread.draws_nothing

    def take(self, slots: list[int], key: bytes | None = None) -> tuple[Any, Any]:
        """Inputs and targets of some slots, a row each, read by this process.

        Args:
            slots: numbers of the slots.
            key: key that the records' random numbers are derived from; None: the program's own.
        """
        return checked(self._reader.__getitems__(Request(slots, self._key(key))))

    def batches(self, parts: Sequence[Sequence[int]], key: bytes | None) -> Iterator[tuple[Any, Any]]:
        """Inputs and targets of physical batches, read ahead by the workers.

        Args:
            parts: slots of each physical batch.
            key: as for `take`.
        """
        if parts:  # a rank's own part may have no record to read shapes from
            yield from self._loader.read(parts, self._key(key))

    @property
    def ragged(self) -> bool:
        """Whether shapes depend on the records: a public option."""
        return isinstance(self.pad_to, str)

    def lengthened(self, pair: tuple[Any, Any]) -> tuple[Any, Any]:
        """Records with one more position of padding, for a test that the model ignores it.

        Args:
            pair: Inputs and targets, a row a record.
        """
        return lengthened(pair, self.pad_value)  # type: ignore[no-any-return]

    def _key(self, key: bytes | None) -> bytes | None:
        """The key, or one of the program's randomness.

        The program's generators move by as much however often a record draws: their states are saved
        with checkpoints of other libraries.
        """
        if key is not None or self.draws_nothing:
            return key
        return bytes(torch.randint(256, (32,)).tolist())

    def start_workers(self) -> None:
        """Start the processes that read ahead; otherwise `batches` starts them."""
        self._loader.start()

    def stop_workers(self) -> None:
        """End the processes that read ahead; the next batch starts others."""
        self._loader.stop()

    @cached_property
    def _loader(self) -> SlotLoader:
        return SlotLoader(self._reader, self.workers, pin_memory=self.pin_memory)

    @cached_property
    def _unread(self) -> Reader:
        """Reader that has not read a record."""
        return Reader(
            self._records,
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
        """Reader that knows the row of the first slot that holds a record."""
        if self.draws_nothing:
            return self._unread
        filled = [] if self.present is None else self.present.nonzero().flatten().tolist()
        rows = checked(self._unread.__getitems__(Request(filled[:1] or [0], bytes(32))))
        return replace(self._unread, template=rows)


Data = tuple[Any, Any] | MapStyle | Source
"""Inputs and targets with a row a record, a map-style data set, or other data that `hush.Source` takes.

Each of the two is a tensor. Inputs may also be a tuple of tensors, for a model that takes several, or a
dictionary of them by the names of the model's arguments.
"""


def prepare(
    data: Data,
    present: Tensor | None = None,
    *,
    pin_memory: bool = False,
) -> Data:
    """Tensors in memory as they are, all other data as a `Source`.

    Args:
        data: Data of any kind.
        present: Mask of the slots that hold a record; None: that of the source, or all do.
        pin_memory: Whether batches go to a GPU.
    """
    if not isinstance(data, Source) and pair_of(data) is not None:
        return data
    source = as_source(data)
    present = source.present if present is None else present
    pin_memory = pin_memory or source.pin_memory
    if present is source.present and pin_memory == source.pin_memory:
        return source  # with its workers, if they were started
    return replace(source, present=present, pin_memory=pin_memory)


def occupied(data: Data, present: Tensor | None) -> Tensor | None:
    """Mask of the slots of prepared data that hold a record."""
    return data.present if isinstance(data, Source) else check_present(present, held_slots(data))


def ragged(data: Data) -> bool:
    """Whether shapes depend on the records, which are padded to the longest of a physical batch."""
    return isinstance(data, Source) and data.ragged


def count(data: Data) -> int:
    """Number of records; raise if they cannot be numbered, or there is none."""
    records = held_slots(data)
    if records == 0:
        raise DataError("the data has no records. Pass at least one.")
    return records


def held_slots(data: Data) -> int:
    """Number of slots of a rank's own part, which may be none."""
    pair = pair_of(data)
    if pair is None:
        return len(as_source(data))
    if all(part.dim() and not len(part) for part in tree_leaves(pair)):
        return 0
    check_lengths(*pair)
    return len(next(tree_leaves(pair)))


def take(data: Data, indices: Tensor, source: "RandomSource | None" = None) -> tuple[Any, Any]:
    """Inputs and targets of some slots, a row each.

    Args:
        data: Tensors, or a source of records.
        indices: Numbers of the slots.
        source: Randomness of a data set that draws (augmentation), with a stream per slot: how much one
            record draws, and which others are read, does not matter. None: the program's own.
    """
    pair = pair_of(data)
    if pair is None:
        return as_source(data).take(indices.tolist(), None if source is None else substream(source).key)
    # does not wait for indices on their way to a GPU
    inputs, targets = tree_map(
        pair, lambda rows: rows[indices.to(rows.device, non_blocking=rows.is_cuda)]
    )
    return inputs, targets


def made_up_record(data: Data) -> tuple[Any, Any]:
    """Inputs and targets of one record of zeros, of the data's shapes and types."""
    inputs, targets = tree_map(
        take(data, torch.arange(1), Stream(torch.device("cpu"), bytes(32))), torch.zeros_like
    )
    return inputs, targets


def _read(
    data: Data, parts: Sequence[Tensor], source: "RandomSource | None"
) -> Iterable[tuple[Any, Any]]:
    """`take` for each of several physical batches, read ahead if the data has workers."""
    if pair_of(data) is not None:
        return (take(data, slots) for slots in parts)
    key = None if source is None else substream(source).key
    return as_source(data).batches([slots.tolist() for slots in parts], key)


def as_source(data: Data) -> Source:
    """The data as a `Source`."""
    return data if isinstance(data, Source) else Source(data)


def describe_record(data: Data) -> str:
    """Dtypes and shapes of a record's inputs and targets, which are public."""
    inputs, targets = (list(tree_leaves(part)) for part in take(data, torch.arange(1)))
    kinds = [f"{str(part.dtype)[6:]} {tuple(part.shape[1:])}" for part in (*inputs, *targets)]
    return f"{', '.join(kinds[: len(inputs)])} -> {', '.join(kinds[len(inputs) :])}"


def pair_of(data: Data) -> Sequence[Any] | None:
    """Inputs and targets, if all of them are tensors in memory."""
    tensors = data.tensors if isinstance(data, TensorDataset) else data
    if not isinstance(tensors, (tuple, list)) or not all(map(_has_tensors, tensors)):
        return None
    if len(tensors) != 2:
        raise DataError(
            f"data of {len(tensors)} tensors: a record is an input and a target. Pass the pair "
            "(inputs, targets), each one tensor with a row a record."
        )
    return tensors


def _has_tensors(part: Any) -> bool:
    """Whether a tree holds tensors, and no arrays: a `Source` reads rows of those."""
    if isinstance(part, Tensor):
        return True
    kinds = [type(value) for value in leaves(part)]
    return any(issubclass(kind, Tensor) for kind in kinds) and not any(
        issubclass(kind, np.ndarray) for kind in kinds
    )


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Slots drawn for one step. Their numbers and their count are sensitive.

    The layout of physical batches follows from the draw alone: an empty slot takes its place like any
    other.
    """

    indices: Tensor
    data: Data
    physical: int
    present: Tensor | None = None
    """Mask of the slots of the data that hold a record; None: all do."""
    counts: Tensor | None = None
    """Number of records of each drawn unit, rising; they are consecutive in `indices`. None: every slot
    is a unit."""

    def __len__(self) -> int:
        """Number of units drawn."""
        return len(self.indices if self.counts is None else self.counts)

    def __iter__(self) -> Iterator[tuple[Any, Any, Tensor | None, Tensor | None]]:
        """`physical_batches` under the program's own randomness."""
        return self.physical_batches(None)

    def physical_batches(
        self, source: "RandomSource | None"
    ) -> Iterator[tuple[Any, Any, Tensor | None, Tensor | None]]:
        """Inputs, targets, mask of the slots with records, and records of each unit, a few at a time.

        The last two are None if all slots hold a record, and if every slot is a unit. No unit is split.

        Args:
            source: Randomness of data sets that draw: see `take`.
        """
        layout = list(self._layout()) if len(self) else []
        rows = _read(self.data, [slots for slots, _ in layout], source)
        for (slots, counts), (inputs, targets) in zip(layout, rows, strict=True):
            yield inputs, targets, None if self.present is None else self.present[slots.cpu()], counts

    def _layout(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Slots of each physical batch, and how many of them each unit has."""
        if self.counts is None:
            yield from ((slots, None) for slots in self.indices.split(self.physical))
            return
        ends = self.counts.cumsum(0)
        unit = slot = 0
        while unit < len(ends):
            room = slot + self.physical
            last = max(unit + 1, int(torch.searchsorted(ends, room, right=True)))
            yield self.indices[slot : int(ends[last - 1])], self.counts[unit:last]
            unit, slot = last, int(ends[last - 1])


def same_slots(drawn: Batch, like: Batch) -> Batch:
    """Batch of the slots of an earlier draw, on data of the same length.

    Args:
        drawn: Batch whose step was not charged.
        like: Batch of the data to read the slots from.
    """
    if held_slots(drawn.data) != held_slots(like.data):
        raise DataError(
            "a batch was drawn and not used, from data of another length than this (under ADD_REMOVE "
            "the numbers are private and not shown), and its slots would be other records'. Keep every "
            "slot: replace a record that does not fit, and pass present= with False to leave one out."
        )
    return replace(like, indices=drawn.indices, counts=drawn.counts)


def no_randomness(source: Stream, device: torch.device) -> None:
    """Advance the source as `own_randomness` does, before work that draws nothing."""
    source.skip(3 if device.type == "cuda" else 2)


@contextmanager
def own_randomness(source: RandomSource, device: torch.device, *, host: bool = True) -> Iterator[None]:
    """Seed torch's global generators from the source, and restore them at the end.

    Args:
        source: Source of their states.
        device: Device of the model.
        host: Whether to seed the CPU's generator as well, if the model is elsewhere.
    """
    # the GPU's first: it gets the same state with and without the other
    shared = [torch.cuda.default_generators[device.index or 0]] if device.type == "cuda" else []
    shared += [torch.default_generator] if host or device.type == "cpu" else []
    states = [generator.get_state() for generator in shared]
    try:
        for generator in shared:
            fill_state(generator, source)
        yield
    finally:
        for generator, state in zip(shared, states, strict=True):
            generator.set_state(state)
