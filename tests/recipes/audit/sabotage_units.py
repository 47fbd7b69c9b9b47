"""Broken versions of a step that protects owners of several records, or whose length is private."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hush.core.parts import Sampling
from hush.core.randomness import RandomSource
from hush.gradients.tape import Reduction, unit_tape
from hush.training.data import Batch, Data, count
from hush.training.step import PrivateStep
from hush.training.units import UnitTable
from tests.recipes.audit.sabotage import replaces

PRIVATE, BATCHES = PrivateStep.private_gradient, PrivateStep.batches
DRAW, LAYOUT = UnitTable.draw, Batch._layout


@replaces(PrivateStep, "draw")
def records_drawn_instead_of_units(
    self: PrivateStep, like: Batch, sampling: Sampling | None = None
) -> Batch:
    """Each record by its own coin at the rate charged; those drawn are then grouped by their owner."""
    assert self.units is not None
    slots = (sampling or self.plan.sampling).draw(count(like.data), self.generator).cpu()
    owners = self.units.owners[slots]
    counts = owners.unique(return_counts=True)[1]
    there = replace(self.units, order=slots[owners.argsort(stable=True)], counts=counts)
    indices, counts = there.draw(torch.arange(len(counts)), self.generator)
    return replace(like, indices=indices, counts=counts)


@replaces(Batch, "_layout")
def records_clipped_one_by_one(self: Batch) -> tuple[Sequence[Tensor], list[None]]:
    """The clipped gradients of a unit's records are added up."""
    parts, _ = LAYOUT(self)
    return parts, [None] * len(parts)


@replaces("hush.training.clipped_gradients.unit_tape")
def an_absent_unit_that_counts(
    tape: Any, counts: Tensor, reduction: Reduction, present: Tensor | None
) -> Any:
    return unit_tape(tape, counts, reduction, None)


@replaces(UnitTable, "draw")
def more_records_than_promised(
    self: UnitTable, drawn: Tensor, source: RandomSource
) -> tuple[Tensor, Tensor]:
    return DRAW(replace(self, per_unit=self.per_unit + 1), drawn, source)


@replaces(PrivateStep, "private_gradient")
def divided_by_the_number_of_rows(self: PrivateStep, batch: Batch) -> Tensor:
    expected = self.plan.sampling.expected
    return PRIVATE(self, batch) * expected(self.records) / expected(count(batch.data))


@replaces(PrivateStep, "batches")
def rows_for_the_number_of_units(
    self: PrivateStep, data: Data, *options: Any, **named: Any
) -> Iterator[Batch]:
    """The divisor follows the length of the data."""
    drawn = BATCHES(self, data, *options, **named)
    self.records = count(data)
    return drawn


@replaces(Batch, "_layout")
def units_cut_at_physical_batches(self: Batch) -> tuple[Sequence[Tensor], list[Tensor]]:
    """A unit whose records are in two physical batches is clipped in each."""
    assert self.counts is not None
    unit = self.counts.new_tensor(range(len(self.counts))).repeat_interleave(self.counts)
    if not len(unit):
        return [], []
    owners = unit.split(self.physical)
    counts = [each.unique_consecutive(return_counts=True)[1] for each in owners]
    return self.indices.split(self.physical), counts
