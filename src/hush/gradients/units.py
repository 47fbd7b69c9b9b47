"""Gradients of units of privacy (people who own several records), in the place of per-sample ones.

A unit is a record with several views: the positions of its records' factors, one after another, are the
positions of the unit's own factors, so that norms, cancellation and sums are those of the tape. Units
that own equally many records are stacked, and none is padded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hush.core.tape import CoordinateMask
from hush.gradients.entrywise_clipping import EntrywiseClipping
from hush.gradients.tape import GradientTape, add_sums

Reduction = Literal["mean", "sum"]
"""How the gradients of a unit's records make up the unit's own."""


@dataclass(frozen=True, eq=False)
class UnitTape(EntrywiseClipping):
    """Gradients of units of privacy: tapes whose records are units, those of equally many together."""

    parts: list[GradientTape]

    @property
    def records(self) -> int:
        """Number of units, each of which counts as one record."""
        return sum(part.records for part in self.parts)

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def norms(self, order: float) -> Tensor:
        """The norm of each unit's gradient over all parameters."""
        return torch.cat([part.norms(order) for part in self.parts])

    def weighted_sum(self, weights: Tensor) -> dict[str, Tensor]:
        """The sum over units of weight times gradient, by parameter name."""
        own = weights.split([part.records for part in self.parts])
        pairs = zip(self.parts, own, strict=True)
        return add_sums([part.weighted_sum(weight) for part, weight in pairs])

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> dict[str, Tensor]:
        """`weighted_sum` of gradients whose entries are clamped to +-limit, then masked."""
        sizes = [part.records for part in self.parts]
        rows = zip(self.parts, weights.split(sizes), limits.split(sizes), strict=True)
        return add_sums([part.clamped_weighted_sum(weight, limit, mask) for part, weight, limit in rows])

    def chunks(self, entries: int | None = None) -> Iterator[tuple[Tensor | slice, dict[str, Tensor]]]:
        """The materialised gradients, a few units at a time."""
        start = 0
        for part in self.parts:
            places = torch.arange(start, start + part.records, device=self.device)
            for rows, gradients in part.chunks(entries):
                yield places[rows], gradients
            start += part.records

    def zeros(self) -> dict[str, Tensor]:
        """The sum over no units."""
        return self.parts[0].zeros()

    def rounding_bounded(self, records: int) -> bool:
        """Whether rounding of a sum over units that own so many records in all is paid for."""
        return all(part.rounding_bounded(records) for part in self.parts)


def unit_tape(
    tape: GradientTape, counts: Tensor, reduction: Reduction, present: Tensor | None
) -> UnitTape:
    """The tape of the units that own a batch's records.

    **Guarantee.** A unit's gradient is a function of its own records, their places and the shapes: see
    docs/guarantees/units.md. It is not finite where that of one of its records is not.

    Args:
        tape: per-sample gradients, the records of a unit one after another, units by rising count.
        counts: (units,), how many of the records each unit owns, rising.
        reduction: a unit's gradient is the mean or the sum of its records'.
        present: which records are there; the others count for nothing, in the mean neither.
    """
    occupied = torch.ones(tape.records, dtype=torch.bool, device=tape.device)
    if present is not None:
        occupied = present
        tape = tape.mask_records(present)
    parts, start = [], 0
    values, units = counts.unique_consecutive(return_counts=True)
    for count, number in zip(values.tolist(), units.tolist(), strict=True):
        rows = slice(start, start + count * number)
        scale = _scale(occupied[rows].unflatten(0, (-1, count)), reduction).flatten()
        own = tape.take(rows)
        parts.append(own if count == 1 else own.of_units(count, scale))
        start = rows.stop
    return UnitTape(parts)


def _scale(occupied: Tensor, reduction: Reduction) -> Tensor:
    """The factor of each record's gradient in its unit's, from which of a unit's places hold one."""
    if reduction == "sum":
        return occupied.double()
    return occupied.double() / occupied.sum(1, keepdim=True).clamp(min=1)
