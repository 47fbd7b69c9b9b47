"""Which slots each rank can read, and which of the slots drawn for a step it works on."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hush.core.errors import DataError, InvalidValue, Unsupported, short_repr
from hush.training.data import Batch, Data, count, describe_record, held_slots, made_up_record
from hush.training.distributed.group import Processes
from hush.training.distributed.process_group import group_initialized
from hush.training.distributed.same_records import Names, check_apart, data_digest, record_names
from hush.training.phases.private_gradient import fingerprint
from hush.training.units import UnitTable


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
        raise DataError(_NO_RECORD)
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


def check_shard(shard: object, processes: Processes | None, units: UnitTable | None) -> bool:
    """Whether each rank holds a part of the data of its own; raises where that is not provided for."""
    if not isinstance(shard, bool):
        raise InvalidValue(
            f"shard={short_repr(shard)} must be True or False: whether the data passed on a rank is its "
            "own part, or all of it.",
            key="shard",
        )
    if shard and units is not None:
        raise Unsupported(
            "shard=True with units: an owner with records on two ranks would be drawn, clipped and "
            "counted on each of them, and cost more than is charged, and no rank sees all owners. Let "
            "every rank read all records (leave shard out)."
        )
    if shard and processes is None and not group_initialized():
        raise InvalidValue(
            "shard=True and torch.distributed is not initialised: a part of the data would be trained "
            "on as all of it. Call torch.distributed.init_process_group first (one process will do), or "
            "leave shard out.",
            key="shard",
        )
    return shard and processes is not None  # the part of the only rank is all


def all_slots(data: Data, processes: Processes, *, shard: bool) -> int:
    """Number of slots of all ranks, before a step is made: of the parts together, or of one."""
    held = held_slots(data) if shard else count(data)
    said: list[int] = processes.exchange("the number of records", held)
    if not any(said):
        raise DataError(_NO_RECORD)
    return sum(said) if shard else held


_NO_RECORD = "no rank has a record: there is nothing to learn from. Pass at least one."


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
