"""Units of privacy (records, or owners of several) as the checks of a step count and draw them."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hush.core.guarantee import Neighbours
from hush.training.data import Batch, Data
from hush.training.step import PrivateStep

Numbers = npt.NDArray[np.int64]
"""Numbers of units of privacy."""


def number_of_units(step: PrivateStep, data: Data) -> int:
    """Units of privacy to draw from: as many as own the data, or its slots where each is one."""
    return step.slots(data) if step.units is None else len(step.units)


def public_divisor(step: PrivateStep, data: Data) -> float:
    """Expected number of units drawn, by which a sum is to be divided.

    Not from `step.records` where the number of units is public, so that a step that changes it is seen.
    """
    private = step.adjacency.neighbours is Neighbours.ADD_REMOVE
    return step.plan.sampling.expected(step.records if private else number_of_units(step, data))


def largest_units(step: PrivateStep, number: int) -> Tensor:
    """Numbers of units that own the most records; where every slot is a unit, of the first ones."""
    if step.units is None:
        return torch.arange(number)
    return step.units.counts.argsort(descending=True, stable=True)[:number]


def batch_of_units(step: PrivateStep, drawn: Tensor, data: Data, physical: int) -> Batch:
    """Batch in which these units take part, with as many of their records as a step takes."""
    batch = Batch(drawn, data, physical)
    if step.units is None:
        return batch
    slots, counts = step.units.draw(drawn, step.generator)
    return replace(batch, indices=slots, counts=counts)


def worked_on(step: PrivateStep, batch: Batch) -> Batch:
    """Slots that the ranks of a step work on together for a batch: their shares, one after another.

    As many as were drawn, each once, unless a rank draws or shares in another way.
    """
    if step.processes is None:
        return batch
    own, placement = step.share(batch), step.placement(batch.data)
    shares = step.processes.gather("the draws", (own.indices.cpu() + placement.first, own.counts))
    indices = torch.cat([slots for slots, _ in shares])
    if own.counts is None:
        return replace(batch, indices=indices)
    return replace(batch, indices=indices, counts=torch.cat([counts for _, counts in shares]))


def units_drawn(step: PrivateStep, batch: Batch) -> Numbers | None:
    """Numbers of the units that take part in a batch; None where their records are not as promised.

    Promised is that a unit's records follow each other, no more than `per_unit`, none twice, and all of
    them its own.
    """
    slots = batch.indices.cpu()
    if step.units is None:
        return np.asarray(slots.numpy())
    if batch.counts is None or int(batch.counts.sum()) != len(slots):
        return None
    counts, owners = batch.counts.cpu(), step.units.owners[slots]
    units = owners[counts.cumsum(0) - counts]
    few = bool(((counts >= 1) & (counts <= step.units.per_unit)).all())
    own = torch.equal(owners, units.repeat_interleave(counts))
    return np.asarray(units.numpy()) if few and own and len(slots.unique()) == len(slots) else None
