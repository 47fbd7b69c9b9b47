"""Broken versions of a step that protects owners of several records, or whose length is private."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hush.core.parts import Sampling
from hush.core.randomness import RandomSource
from hush.gradients.tape import Reduction, unit_tape
from hush.training.data import Batch, Data, count
from hush.training.step import PrivateStep
from hush.training.units import UnitTable

PRIVATE, BATCHES = PrivateStep.private_gradient, PrivateStep.batches
DRAW, LAYOUT = UnitTable.draw, Batch._layout


def records_drawn_instead_of_units(patch: pytest.MonkeyPatch) -> None:
    """Each record by its own coin at the rate charged; those drawn are then grouped by their owner."""

    def draw(self: PrivateStep, like: Batch, sampling: Sampling | None = None) -> Batch:
        assert self.units is not None
        slots = (sampling or self.plan.sampling).draw(count(like.data), self.generator).cpu()
        owners = self.units.owners[slots]
        counts = owners.unique(return_counts=True)[1]
        there = replace(self.units, order=slots[owners.argsort(stable=True)], counts=counts)
        indices, counts = there.draw(torch.arange(len(counts)), self.generator)
        return replace(like, indices=indices, counts=counts)

    patch.setattr(PrivateStep, "draw", draw)


def records_clipped_one_by_one(patch: pytest.MonkeyPatch) -> None:
    """The clipped gradients of a unit's records are added up."""

    def layout(self: Batch) -> tuple[Sequence[Tensor], list[None]]:
        parts, _ = LAYOUT(self)
        return parts, [None] * len(parts)

    patch.setattr(Batch, "_layout", layout)


def an_absent_unit_that_counts(patch: pytest.MonkeyPatch) -> None:
    def as_if_present(tape: Any, counts: Tensor, reduction: Reduction, present: Tensor | None) -> Any:
        return unit_tape(tape, counts, reduction, None)

    patch.setattr("hush.training.clipped_gradients.unit_tape", as_if_present)


def more_records_than_promised(patch: pytest.MonkeyPatch) -> None:
    def draw(self: UnitTable, drawn: Tensor, source: RandomSource) -> tuple[Tensor, Tensor]:
        return DRAW(replace(self, per_unit=self.per_unit + 1), drawn, source)

    patch.setattr(UnitTable, "draw", draw)


def divided_by_the_number_of_rows(patch: pytest.MonkeyPatch) -> None:
    def private(self: PrivateStep, batch: Batch) -> Tensor:
        expected = self.plan.sampling.expected
        return PRIVATE(self, batch) * expected(self.records) / expected(count(batch.data))

    patch.setattr(PrivateStep, "private_gradient", private)


def rows_for_the_number_of_units(patch: pytest.MonkeyPatch) -> None:
    """The divisor follows the length of the data."""

    def batches(self: PrivateStep, data: Data, *options: Any, **named: Any) -> Iterator[Batch]:
        drawn = BATCHES(self, data, *options, **named)
        self.records = count(data)
        return drawn

    patch.setattr(PrivateStep, "batches", batches)


def units_cut_at_physical_batches(patch: pytest.MonkeyPatch) -> None:
    """A unit whose records are in two physical batches is clipped in each."""

    def layout(self: Batch) -> tuple[Sequence[Tensor], list[Tensor]]:
        assert self.counts is not None
        unit = self.counts.new_tensor(range(len(self.counts))).repeat_interleave(self.counts)
        owners = unit.split(self.physical)
        counts = [each.unique_consecutive(return_counts=True)[1] for each in owners]
        return self.indices.split(self.physical), counts

    patch.setattr(Batch, "_layout", layout)
