"""Data as numbered slots of records, batches of them, and the randomness they are processed with."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from hush.core.errors import DataError
from hush.core.randomness import Randomness, fill_state, random_words
from hush.core.ranges import with_article
from hush.gradients.tree import tree_leaves, tree_map

_TWISTER_WORDS = 624
"""32-bit words in the state of a Mersenne twister."""


@runtime_checkable
class MapStyle(Protocol):
    """A data set whose records have numbers: item i is the pair (input, target) of record i."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data = tuple[Any, Any] | MapStyle
"""Inputs and targets with one row a record, or a map-style data set.

Each of the two is a tensor. Inputs may also be a tuple of tensors, for a model that takes several, or a
dictionary of them by the names of the model's arguments.
"""


def count(data: Data) -> int:
    """Number of records; raises if they cannot be numbered."""
    pair = pair_of(data)
    if pair is not None:
        _check_tensors(*pair)
        return _not_empty(len(next(tree_leaves(pair))))
    if isinstance(data, tuple) and len(data) == 2:
        kinds = " and ".join(type(part).__name__ for part in data)
        raise DataError(
            f"inputs and targets are of the kinds {kinds}, and gradients are taken of tensors. Pass "
            "(torch.as_tensor(inputs), torch.as_tensor(targets))."
        )
    if not isinstance(data, MapStyle) or isinstance(data, (tuple, list, dict, Tensor)):
        raise DataError(
            f"{with_article(type(data).__name__)} has no numbered records: sampling by chance needs "
            "to pick any record at any time. Pass two tensors (inputs, targets) or a map-style data set "
            "(of a DataLoader, its .dataset)."
        )
    return _not_empty(len(data))


def _check_tensors(inputs: Any, targets: Any) -> None:
    """Raise unless tensors in memory have one row a record each."""
    parts = [list(tree_leaves(part)) for part in (inputs, targets)]
    if any(rows.is_nested for rows in (*parts[0], *parts[1])):
        raise DataError(f"data with a nested tensor, of records of several lengths: {_ONE_SHAPE}")
    scalar = any(not rows.dim() for rows in (*parts[0], *parts[1]))
    counts = [[len(rows) for rows in part if rows.dim()] for part in parts]
    if not scalar and len({*counts[0], *counts[1]}) == 1:
        return
    listed = isinstance(targets, (list, tuple))
    if isinstance(inputs, (list, tuple)) and len(inputs) in ([len(targets)] if listed else counts[1]):
        # their lengths are private
        raise DataError(
            f"inputs is a {type(inputs).__name__} of {len(inputs)} tensors, one a record: {_ONE_SHAPE} "
            "If they are of one shape, pass torch.stack(inputs), and one tensor of targets."
        )
    if scalar:
        raise DataError(
            "data with a tensor of shape (): it has no rows, and a record is one of each. Pass "
            "tensors whose first dimension is the records."
        )
    raise DataError(
        f"{' and '.join(map(str, counts[0]))} inputs and {counts[1][0]} targets: each record needs one "
        "of each, or one record's influence is not bounded. Pass tensors with the same number of rows."
    )


_ONE_SHAPE = (
    "the records of a batch are worked on together, in one tensor. Pad them all to one public length "
    "(torch.nn.utils.rnn.pad_sequence, and a mask as another input), or cut them."
)


def _not_empty(records: int) -> int:
    if records == 0:
        raise DataError("the data has no records: there is nothing to learn from. Pass at least one.")
    return records


def held_slots(data: Data) -> int:
    """Slots of a rank's own part, which may be none."""
    pair = pair_of(data)
    if pair is not None and all(part.dim() and not len(part) for part in tree_leaves(pair)):
        return 0
    if pair is None and isinstance(data, MapStyle) and not isinstance(data, tuple) and not len(data):
        return 0
    return count(data)


def take(data: Data, indices: Tensor, source: "Randomness | None" = None) -> tuple[Any, Any]:
    """Inputs and targets of the records of these indices.

    Args:
        data: tensors, or a map-style data set.
        indices: numbers of the slots.
        source: randomness of a data set that draws when it is asked for a record (augmentation): fresh
            for each slot, so that how much one record draws moves no other; None: the program's own.
    """
    pair = pair_of(data)
    if pair is not None:
        # indices on their way to a GPU are not waited for
        inputs, targets = tree_map(
            pair, lambda rows: rows[indices.to(rows.device, non_blocking=rows.is_cuda)]
        )
        return inputs, targets
    if source is None:
        items = [data[index] for index in indices.tolist()]
    else:
        items = []
        with global_randomness(source) as refresh:
            for index in indices.tolist():
                refresh()
                items.append(data[index])
    try:
        records = default_collate(items)
    except (KeyError, RuntimeError, TypeError, ValueError):
        raise DataError(
            "records of this data set cannot be stacked, as they differ in shape or in kind or are not "
            f"made of tensors, arrays and numbers (which is private and not shown): {_ONE_SHAPE}"
        ) from None
    if (
        not isinstance(records, (tuple, list))
        or len(records) != 2
        or not all(map(_has_tensors, records))
    ):
        raise DataError(
            f"a record of this data set is not a pair (input, target) of tensors but gives "
            f"{type(records).__name__}: wrap the data set so that item i is such a pair."
        )
    inputs, targets = records
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets


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
    return next(tree_leaves(part), None) is not None


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
        self, source: "Randomness | None"
    ) -> Iterator[tuple[Any, Any, Tensor | None, Tensor | None]]:
        """Inputs, targets, which of them are records, and records of each unit, a few slots at a time.

        The last two are None where all slots hold a record, and where every slot is a unit. No unit is
        in two physical batches.

        Args:
            source: randomness of data sets that draw, fresh for each slot: see `take`.
        """
        for slots, counts in self._layout() if len(self) else ():
            inputs, targets = take(self.data, slots, source)
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


def check_present(present: object, slots: int) -> Tensor | None:
    """`present` if it says of each slot whether it holds a record; raises otherwise."""
    if present is None:
        return None
    if not isinstance(present, Tensor) or present.dtype != torch.bool or present.shape != (slots,):
        raise DataError(
            f"present must be a boolean tensor with {slots} entries, one a slot: an absent record "
            "leaves its slot empty, and the number of slots is public. Pass e.g. "
            f"torch.ones({slots}, dtype=torch.bool) with False where a record is missing."
        )
    return present


@contextmanager
def own_randomness(source: Randomness, device: torch.device, *, host: bool = True) -> Iterator[None]:
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


@contextmanager
def global_randomness(source: Randomness) -> Iterator[Callable[[], None]]:
    """Let the global generators of torch (CPU), numpy and Python draw from the source for a while.

    Args:
        source: what their states are drawn from.

    Returns:
        A function that draws all three states anew; the old ones come back at the end.
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002

    def refresh() -> None:
        fill_state(torch.default_generator, source)
        words = random_words(_TWISTER_WORDS, source).view(np.uint32).reshape(2, _TWISTER_WORDS)
        np.random.set_state(("MT19937", words[0], _TWISTER_WORDS, 0, 0.0))  # noqa: NPY002
        random.setstate((3, (*words[1].tolist(), _TWISTER_WORDS), None))

    try:
        yield refresh
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])  # noqa: NPY002
        random.setstate(before[2])
