"""Slots that each rank reads and processes, and comparison of the data of ranks."""

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
    pair_of,
    take,
)
from hush.training.distributed.processes import Processes
from hush.training.fingerprint import fingerprint
from hush.training.records import base_dataset

_SPREAD = 256
"""Records, spread over the data, whose digest shows whether two ranks have the same data."""
_SPREAD_ITEMS = 8
"""Their number for a data set that reads records one by one."""


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


def subset_numbers(data: Data) -> tuple[str | None, npt.NDArray[np.int64]] | None:
    """Digest of the data set that a `Subset` refers to, and its numbers there; None if it is none."""
    source = None if pair_of(data) is not None else as_source(data)
    if source is None or not isinstance(source.dataset, Subset):
        return None
    base, indices = base_dataset(source.dataset)
    whole = replace(source, dataset=base, present=None)
    return data_digest(whole, count(whole)), np.asarray(indices, np.int64)


@dataclass(frozen=True)
class Placement:
    """Slots that a rank can read, numbered over the data of all ranks."""

    first: int
    """Number of this rank's first slot."""
    held: int
    """Slots that this rank holds."""
    slots: int
    """Slots of all ranks."""


def place(data: Data, present: Tensor | None, processes: Processes, *, shard: bool) -> Placement:
    """Place of this rank's data among all slots, after the ranks have compared their data.

    Args:
        data: Data of this rank.
        present: Which of its slots hold a record.
        processes: Ranks that run the step.
        shard: Whether each rank holds its own part; otherwise all hold the same data.

    Raises:
        DataError: On every rank, if data that should be equal differ, or parts share records.
    """
    held = held_slots(data) if shard else count(data)
    own = (describe_record(data), data_digest(data, held)) if held else (None, None)
    filled = None if present is None else fingerprint([present])
    numbers = subset_numbers(data) if shard and held else None
    gathered = processes.gather("comparing the data", (held, *own, filled, numbers))
    if shard:
        _check_parts(gathered)
        sizes = [part[0] for part in gathered]
        return Placement(sum(sizes[: processes.rank]), held, sum(sizes))
    for rank, other in enumerate(gathered):
        for what, ours, theirs in zip(_SAME, gathered[0], other, strict=False):
            if ours != theirs:
                raise DataError(
                    f"the data of rank 0 and of rank {rank} differ in {what.format(ours, theirs)}: a "
                    "record in several slots would count several times in a step. Give every rank the "
                    "same records in the same order (load them unshuffled, or with one seed), or "
                    "shard=True for parts of its own."
                )
    return Placement(0, held, held)


_SAME = (
    "the number of records (which under ADD_REMOVE is private, and not shown)",
    "what a record is ({} and {})",
    "which record is in which slot (they are private and not shown)",
    "which slots are empty (present=, which is private and not shown)",
)


def _check_parts(parts: list[tuple[Any, ...]]) -> None:
    """Raise unless the ranks hold parts of one data set that share no record, as far as is known."""
    filled = [(rank, part) for rank, part in enumerate(parts) if part[0]]
    if not filled:
        raise DataError(NO_RECORD)
    for (rank, part), (other, theirs) in combinations(filled, 2):
        if part[1] != theirs[1]:
            raise DataError(
                f"records of rank {rank} are {part[1]} and those of rank {other} {theirs[1]}: they "
                "cannot train one model. Pass parts of one data set."
            )
        same = part[2] is not None and part[:3] == theirs[:3] and part[0] > 1
        if same or _common_numbers(part[4], theirs[4]):
            raise DataError(
                f"ranks {rank} and {other} hold the same records, and shard=True says that each rank "
                "has its own: such a record would count several times and cost more than is charged. "
                "Cut the data once, without repeating records to make parts equal (as "
                "DistributedSampler does), e.g. data[rank::ranks]; or leave shard out."
            )


def _common_numbers(ours: Any, theirs: Any) -> bool:
    """Whether two results of `subset_numbers` name a common record of one data set."""
    if ours is None or theirs is None or ours[0] is None or ours[0] != theirs[0]:
        return False
    return len(np.intersect1d(ours[1], theirs[1])) > 0


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
