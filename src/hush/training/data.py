"""Data as numbered slots of records, batches of them, and the randomness they are processed with."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from hush.core.errors import DataError
from hush.core.randomness import RandomSource, Stream, fill_state, substream
from hush.gradients.tree import tree_leaves, tree_map
from hush.training.sources.records import MapStyle, check_lengths, check_present, leaves
from hush.training.sources.source import Source

Data = tuple[Any, Any] | MapStyle | Source
"""Inputs and targets with one row a record, a map-style data set, or what else `hush.Source` takes.

Each of the two is a tensor. Inputs may also be a tuple of tensors, for a model that takes several, or a
dictionary of them by the names of the model's arguments.
"""


def prepare(
    data: Data,
    present: Tensor | None = None,
    *,
    pin_memory: bool = False,
) -> Data:
    """The data as it is read: tensors in memory as they are, everything else as a `Source`.

    Args:
        data: of any kind.
        present: which slots hold a record; None: as a `Source` says, or all do.
        pin_memory: whether batches go to a GPU.
    """
    if not isinstance(data, Source) and pair_of(data) is not None:
        return data
    source = data if isinstance(data, Source) else Source(data)
    present = source.present if present is None else present
    pin_memory = pin_memory or source.pin_memory
    if present is source.present and pin_memory == source.pin_memory:
        return source  # with its workers, if they are at work
    return replace(source, present=present, pin_memory=pin_memory)


def occupied(data: Data, present: Tensor | None) -> Tensor | None:
    """Which slots of data that was prepared hold a record: as the source says, or as was passed."""
    return data.present if isinstance(data, Source) else check_present(present, held_slots(data))


def count(data: Data) -> int:
    """Number of records; raises if they cannot be numbered."""
    pair = pair_of(data)
    if pair is not None:
        check_lengths(*pair)
        return _not_empty(len(next(tree_leaves(pair))))
    return _not_empty(len(as_source(data)))


def _not_empty(records: int) -> int:
    if records == 0:
        raise DataError("the data has no records: there is nothing to learn from. Pass at least one.")
    return records


def held_slots(data: Data) -> int:
    """Slots of a rank's own part, which may be none."""
    pair = pair_of(data)
    if pair is not None and all(part.dim() and not len(part) for part in tree_leaves(pair)):
        return 0
    if pair is None and not len(as_source(data)):
        return 0
    return count(data)


def take(data: Data, indices: Tensor, source: "RandomSource | None" = None) -> tuple[Any, Any]:
    """Inputs and targets of the records of these indices.

    Args:
        data: tensors, or a source of records.
        indices: numbers of the slots.
        source: randomness of a data set that draws when it is asked for a record (augmentation): each
            slot has a stream of its own, so that how much one record draws moves no other, nor who is
            drawn beside it; None: the program's own.
    """
    pair = pair_of(data)
    if pair is None:
        return as_source(data).take(indices.tolist(), None if source is None else substream(source).key)
    # indices on their way to a GPU are not waited for
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
    """`take` for each of several physical batches, read ahead where the data has workers."""
    if pair_of(data) is not None:
        return (take(data, slots) for slots in parts)
    key = None if source is None else substream(source).key
    return as_source(data).batches([slots.tolist() for slots in parts], key)


def as_source(data: Data) -> Source:
    """The data as a `Source`: itself, or one that reads it as it is."""
    return data if isinstance(data, Source) else Source(data)


def describe_record(data: Data) -> str:
    """Dtypes and shapes of a record's inputs and targets, which are public."""
    inputs, targets = (list(tree_leaves(part)) for part in take(data, torch.arange(1)))
    kinds = [f"{str(part.dtype)[6:]} {tuple(part.shape[1:])}" for part in (*inputs, *targets)]
    return f"{', '.join(kinds[: len(inputs)])} -> {', '.join(kinds[len(inputs) :])}"


def pair_of(data: Data) -> Sequence[Any] | None:
    """Inputs and targets, where all of them are tensors in memory."""
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
    """Whether a tree holds tensors, and no arrays: rows of those are read by a `Source`."""
    kinds = [type(value) for value in leaves(part)]
    return any(issubclass(kind, Tensor) for kind in kinds) and not any(
        issubclass(kind, np.ndarray) for kind in kinds
    )


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Slots drawn for one step. Which and how many they are is sensitive.

    The layout, which slots share a physical batch and in which order, follows from the draw alone:
    an empty slot that is drawn takes its place like any other.
    """

    indices: Tensor
    data: Data
    physical: int
    present: Tensor | None = None
    """Whether each slot of the data holds a record; None: all do."""
    counts: Tensor | None = None
    """Where units own the records: how many of each unit drawn take part, rising; they follow each
    other in `indices`. None: every slot is a unit."""

    def __len__(self) -> int:
        """Number of units drawn."""
        return len(self.indices if self.counts is None else self.counts)

    def __iter__(self) -> Iterator[tuple[Any, Any, Tensor | None, Tensor | None]]:
        """`physical_batches` under the program's own randomness."""
        return self.physical_batches(None)

    def physical_batches(
        self, source: "RandomSource | None"
    ) -> Iterator[tuple[Any, Any, Tensor | None, Tensor | None]]:
        """Inputs, targets, which of them are records, and records of each unit, a few slots at a time.

        The last two are None where all slots hold a record, and where every slot is a unit. No unit is
        in two physical batches.

        Args:
            source: randomness of data sets that draw, each slot's own: see `take`.
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
        drawn: batch whose step did not run to its charge.
        like: batch of the data to take the slots from.
    """
    if held_slots(drawn.data) != held_slots(like.data):
        raise DataError(
            "a batch was drawn and not used, from data of another length than this (under ADD_REMOVE "
            "the numbers are private and not shown): its slots would be other records', and leaving it "
            "out would make the sampling depend on the records. Keep every slot: put a record that fits "
            "in place of one that does not, and pass present= with False there to leave it out."
        )
    return replace(like, indices=drawn.indices, counts=drawn.counts)


@contextmanager
def own_randomness(source: RandomSource, device: torch.device, *, host: bool = True) -> Iterator[None]:
    """Let torch's global generators draw from states of the source, and leave them as they were.

    Args:
        source: what their states are drawn from.
        device: where the model is.
        host: the CPU's generator as well, if the model is elsewhere.
    """
    # the GPU's first: it gets the same state whether the other is wanted or not
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
