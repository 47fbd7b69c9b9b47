"""Dominating pairs for batches of fixed or limited size. Records compete for places in these batches.

Proofs: docs/guarantees/limited-batches.md.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from hush.accounting.numerics import Array
from hush.accounting.pld.privacy_loss import Direction, SampledPair, Step


@dataclass(frozen=True)
class SymmetricLaw(Step):
    """Smallest symmetric pair that dominates a Poisson-sampled step in both directions.

    Its positive losses are those of `base` in the direction `REMOVE`. Its negative losses are the
    reflection, with the two distributions exchanged. The remaining probability has loss zero.
    """

    base: SampledPair

    def with_representable_loss(self) -> Self:
        return replace(self, base=self.base.with_representable_loss())

    @property
    def total_variation(self) -> float:
        return self.base.total_variation

    @property
    def ratio_range(self) -> tuple[float, float]:
        high = self.base.ratio_range[1]
        return -high, high

    def log_ratio(self, outcomes: Array) -> Array:
        # only used for the origin of a grid, which is the atom at loss zero
        return 0 * outcomes

    def outcome_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        return self.base.outcome_quantiles(direction, tail)

    def loss_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        # the tail of the second distribution is smaller than that of the first
        high = self.base.loss_quantiles(Direction.REMOVE, tail)[1]
        return -high, high

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        losses, weights = self.base.loss_quadrature(Direction.REMOVE, tail)
        positive = losses > 0
        losses, weights = losses[positive], weights[positive]
        mirrored = weights - losses
        rest = 1 - np.exp(weights).sum() - np.exp(mirrored).sum()
        atom = math.log(max(float(rest), 1e-300))
        return np.concatenate([losses, -losses, [0.0]]), np.concatenate([weights, mirrored, [atom]])

    def _outcome_masses(self, direction: Direction, ratios: Array) -> tuple[Array, Array, Array]:
        above, below = ratios[ratios >= 0], -ratios[ratios < 0][::-1]
        first, second, error = self._tail_cells(above)
        mirrored_second, mirrored_first, mirrored_error = self._tail_cells(below)
        atom = max(0.0, 1 - first.sum() - mirrored_first.sum())
        # the cell with loss zero contains the innermost part of each side
        masses = []
        for inner, outer in ((first, mirrored_first), (second, mirrored_second)):
            middle = inner[0] + outer[0] + atom
            masses.append(np.concatenate([outer[:0:-1], [middle], inner[1:]]))
        return masses[0], masses[1], np.concatenate([mirrored_error[::-1], error])

    def _tail_cells(self, cuts: Array) -> tuple[Array, Array, Array]:
        """Probabilities under `base` between zero, increasing cuts and infinity, and rounding errors."""
        first, second, error = self.base._outcome_masses(Direction.REMOVE, np.append(0.0, cuts))
        return first[1:], second[1:], error[1:]


@dataclass(frozen=True)
class MixedLaw(Step):
    """Mixture of two steps, with a public random choice of the step: `second` has weight `share`."""

    first: SampledPair
    second: SymmetricLaw
    share: float

    @property
    def _parts(self) -> list[tuple[Step, float]]:
        return [(self.first, 1 - self.share), (self.second, self.share)]

    def with_representable_loss(self) -> Self:
        first, second = self.first.with_representable_loss(), self.second.with_representable_loss()
        return replace(self, first=first, second=second)

    @property
    def total_variation(self) -> float:
        return sum(weight * part.total_variation for part, weight in self._parts)

    @property
    def ratio_range(self) -> tuple[float, float]:
        return self.second.ratio_range

    def log_ratio(self, outcomes: Array) -> Array:
        return self.first.log_ratio(outcomes)

    def outcome_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        return self.first.outcome_quantiles(direction, tail)

    def _decisive_parts(self, tail: float) -> list[tuple[Step, float, float]]:
        """Steps with a weight above half the tail, their weights, and their own tails."""
        return [
            (part, weight, min(0.25, tail / 2 / weight))
            for part, weight in self._parts
            if weight > tail / 2
        ]

    def loss_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        ends = [part.loss_quantiles(direction, own) for part, _, own in self._decisive_parts(tail)]
        return min(low for low, _ in ends), max(high for _, high in ends)

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        losses, weights = [], []
        for part, weight, own in self._decisive_parts(tail):
            places, log_weights = part.loss_quadrature(direction, own)
            losses.append(places)
            weights.append(log_weights + math.log(weight))
        return np.concatenate(losses), np.concatenate(weights)

    def _outcome_masses(self, direction: Direction, ratios: Array) -> tuple[Array, Array, Array]:
        (one, weight), (other, share) = (
            (part._outcome_masses(direction, ratios), weight) for part, weight in self._parts
        )
        first, second = (weight * one[k] + share * other[k] for k in range(2))
        return first, second, np.maximum(one[2], other[2])
