"""Slots that each rank reads and processes, and comparison of the records of ranks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Subset

from hush.core.errors import DataError
from hush.core.randomness import Stream
from hush.gradients.tree import tree_leaves
from hush.training.data import (
    Batch,
    Data,
    as_source,
    count,
    describe_record,
    held_slots,
    made_up_record,
    pair_of,
    take,
)
from hush.training.disjoint import input_names
from hush.training.distributed.processes import Processes
from hush.training.fingerprint import fingerprint
from hush.training.sources.records import base_dataset

_SPREAD = 256
"""Records, spread over the data, that tell whether two ranks have the same data in the same order."""
_SPREAD_ITEMS = 8
"""As many of a data set that has to be asked for each of them."""
_NAMED = 2**17
"""Records of each rank's part that are named, spread over it; more take seconds."""
_CHANCE = 8
"""Equal records on two ranks for each within one of them, beyond which chance is no explanation.

Of a data set that was cut at random, as many equal pairs fall on two given ranks as within the two.
"""


@dataclass(frozen=True, eq=False)
class Names:
    """Names of the records of one rank's part; equal records have equal names."""

    names: npt.NDArray[np.int64]
    cut_from: str | None = None
    """Fingerprint of the data set that names are numbers in; None: they are hashes of inputs, which
    different people's records may share."""


def data_digest(data: Data, slots: int) -> str | None:
    """Fingerprint of some records, spread over the slots; None if they come out different each time."""
    number = _SPREAD if pair_of(data) is not None else _SPREAD_ITEMS
    chosen = torch.linspace(0, slots - 1, min(slots, number)).long()

    def read() -> str:
        # a data set that draws gives the same records under the same randomness, on every rank
        values = take(data, chosen, Stream(torch.device("cpu"), bytes(32)))
        return fingerprint([part for part in tree_leaves(values) if part.layout == torch.strided])

    first = read()
    return first if pair_of(data) is not None or read() == first else None


def record_names(data: Data, held: int) -> Names | None:
    """Names of a part's records: numbers in the data set that it was cut from, or hashes of inputs.

    Args:
        data: part of one rank.
        held: slots of it, one or more.

    Returns:
        None where every record would have to be read, which may take as long as an epoch.
    """
    source = None if pair_of(data) is not None else as_source(data)
    if source is not None and isinstance(source.dataset, Subset):
        base, indices = base_dataset(source.dataset)
        whole = replace(source, dataset=base, present=None)
        digest = data_digest(whole, count(whole))
        return None if digest is None else Names(np.asarray(indices, np.int64), digest)
    if source is not None and not source.draws_nothing:
        return None
    slots = torch.linspace(0, held - 1, min(held, _NAMED), dtype=torch.float64).long()
    return Names(np.frombuffer(b"".join(name[:8] for name in input_names(data, slots)), np.int64))


def check_unmoved(before: Sequence[Names | None], after: Sequence[Names | None]) -> None:
    """Raise if most records have changed slots since a batch was drawn, as far as that can be told.

    A record that was mended stays in its slot, whatever becomes of it. Names that several records had
    say nothing. As `check_apart`, a guard against a mistake, which depends on the private records.

    Args:
        before: of each rank's part when the batch was drawn, slot by slot.
        after: likewise, now.
    """
    pairs = [(old, new) for old, new in zip(before, after, strict=True) if old and new]
    comparable = {part.cut_from for pair in pairs for part in pair}
    if len(comparable) != 1 or any(len(old.names) != len(new.names) for old, new in pairs):
        return
    old, new = (np.concatenate([part.names for part in side]) for side in zip(*pairs, strict=True))
    names, counts = np.unique(old, return_counts=True)
    moved = (old != new) & np.isin(new, names[counts == 1])
    if moved.sum() > (old == new).sum():
        raise DataError(
            "a batch was drawn and not used, and most records are in other slots now, on other ranks "
            "or in another order: its slots would be other records', picked after the draw. Pass the "
            "records on the ranks and in the order that they were in, each mended by itself."
        )


def check_apart(parts: list[Names | None]) -> None:
    """Raise if two ranks hold records in common, as far as that can be told.

    Whether this raises depends on the private records. It is a guard against a mistake, to stop a run
    before anything is released, and not part of what is released.

    Args:
        parts: of each rank.
    """
    for (first, ours), (second, theirs) in combinations(enumerate(parts), 2):
        if ours is None or theirs is None or ours.cut_from != theirs.cut_from:
            continue
        common = len(np.intersect1d(ours.names, theirs.names))
        repeated = sum(len(part.names) - len(np.unique(part.names)) for part in (ours, theirs))
        if common > (_CHANCE * max(1, repeated) if ours.cut_from is None else 0):
            raise DataError(
                f"ranks {first} and {second} hold the same records, and shard=True says that each rank "
                "has its own: a record that several ranks hold would be drawn and counted several "
                "times, and cost more than is charged. Cut the data once, in one order and without "
                "repeating records to make parts equal (as DistributedSampler does), e.g. "
                "data[rank::ranks]; or leave shard out where every rank can read all records."
            )


@dataclass(frozen=True)
class Placement:
    """Slots that a rank can read, numbered over the data of all ranks."""

    first: int
    """Number of this rank's first slot."""
    held: int
    """Slots that this rank holds."""
    slots: int
    """Slots of all ranks."""
    names: tuple[Names | None, ...] = ()
    """Of the records of each rank's part, where each has its own (sensitive)."""


def place(data: Data, present: Tensor | None, processes: Processes, *, shard: bool) -> Placement:
    """Where this rank's data lies among all slots, after the ranks have compared theirs.

    Args:
        data: of this rank.
        present: which of its slots hold a record.
        processes: the ranks.
        shard: whether each rank holds a part of its own; otherwise all hold the same data.

    Raises:
        DataError: On every rank, where data that should be the same differs, or parts do not.
    """
    held = held_slots(data) if shard else count(data)
    own = (describe_record(data), data_digest(data, held)) if held else (None, None)
    filled = None if present is None else fingerprint([present])
    names = record_names(data, held) if shard and held else None
    gathered = processes.gather("comparing the data", ((held, *own, filled), names))
    described = [facts for facts, _ in gathered]
    if shard:
        placement = _placed_parts(described, processes.rank)
        parts = [named for _, named in gathered]
        check_apart(parts)
        return replace(placement, names=tuple(parts))
    for rank, other in enumerate(described):
        for what, ours, theirs in zip(_SAME, described[0], other, strict=True):
            if ours != theirs:
                raise DataError(
                    f"the data of rank 0 and of rank {rank} differ in {what.format(ours, theirs)}: a "
                    "record that is in several slots, because ranks number the records differently, "
                    "would count several times in a step. Give every rank the same records in the same "
                    "order (load them unshuffled, or with one seed), or shard=True for parts of its own."
                )
    return Placement(0, held, held)


_SAME = (
    "the number of records (which under ADD_REMOVE is private, and not shown)",
    "what a record is ({} and {})",
    "which record is in which slot (they are private and not shown)",
    "which slots are empty (present=, which is private and not shown)",
)


def _placed_parts(described: list[tuple[Any, ...]], rank: int) -> Placement:
    """Where a rank's part lies, parts one after another in the order of ranks."""
    filled = [(other, each) for other, each in enumerate(described) if each[0]]
    if not filled:
        raise DataError(NO_RECORD)
    for number, (other, each) in enumerate(filled):
        first, begun = filled[0]
        if each[1] != begun[1]:
            raise DataError(
                f"records of rank {first} are {begun[1]} and those of rank {other} {each[1]}: they "
                "cannot train one model. Pass parts of one data set."
            )
        for earlier, before in filled[:number]:
            if each[2] is not None and each[:3] == before[:3] and each[0] > 1:
                raise DataError(
                    f"ranks {earlier} and {other} hold the same records and shard=True says "
                    "that each rank has its own: a record that several ranks hold would be drawn and "
                    "counted several times, and cost more than is charged. Pass disjoint parts, or "
                    "leave shard out where every rank can read all records."
                )
    sizes = [each[0] for each in described]
    return Placement(sum(sizes[:rank]), sizes[rank], sum(sizes))


NO_RECORD = "no rank has a record: there is nothing to learn from. Pass at least one."


def share_of(batch: Batch, placement: Placement, processes: Processes, *, shard: bool) -> Batch:
    """Part of a logical batch that this rank works on: a function of the draw and of public numbers.

    Where every rank reads all, a run of slots as long as the others' (to one slot, or one unit), so that
    all have as many physical batches; else the slots that the rank holds.

    Args:
        batch: slots drawn, numbered over the data of all ranks.
        placement: of this rank.
        processes: the ranks.
        shard: whether each rank holds a part of its own.
    """
    rank, size = processes.rank, processes.size
    if shard:
        own = (batch.indices >= placement.first) & (batch.indices < placement.first + placement.held)
        return replace(batch, indices=batch.indices[own] - placement.first)
    drawn = len(batch.indices)
    cuts = [drawn * number // size for number in range(size + 1)]
    if batch.counts is None:
        return replace(batch, indices=batch.indices[cuts[rank] : cuts[rank + 1]])
    ends = batch.counts.cumsum(0)
    units = torch.searchsorted(ends, torch.tensor(cuts), right=True).tolist()
    first, last = ([0, *units[1:-1], len(ends)][number] for number in (rank, rank + 1))
    slots = [int(ends[unit - 1]) if unit else 0 for unit in (first, last)]
    return replace(batch, indices=batch.indices[slots[0] : slots[1]], counts=batch.counts[first:last])


def padded_batches(
    batches: Iterator[tuple[Any, Any, Tensor | None, Tensor | None]], passes: int, data: Data
) -> Iterator[tuple[Any, Any, Tensor | None, Tensor | None]]:
    """The physical batches of a rank, and then as many of one empty slot as other ranks have more.

    Args:
        batches: of the rank's share.
        passes: physical batches of the rank that has most.
        data: only shapes and types count.
    """
    own = 0
    for batch in batches:
        own += 1
        yield batch
    if own < passes:
        inputs, targets = made_up_record(data)
        for _ in range(passes - own):
            yield inputs, targets, torch.zeros(1, dtype=torch.bool), None
