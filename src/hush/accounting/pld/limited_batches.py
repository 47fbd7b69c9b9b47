"""Dominating pairs for batches of fixed or limited size. Records compete for places in these batches.

Proofs: docs/guarantees/limited-batches.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from hush.accounting.numerics import UNIT, Array, log_mixture_ratio_absolute, log_weights
from hush.accounting.pld.laws import MAX_LOSS
from hush.accounting.pld.privacy_loss import (
    Direction,
    GroupLaw,
    SampledPair,
    Step,
    mixture_quantiles,
    noise_masses,
)

# Multipliers below which negative losses of `CompetingPair`, or losses, would not fit the arithmetic.
MIN_COMPETING_MULTIPLIER, _MIN_UPPER_MULTIPLIER = 0.05, 2e-3


@dataclass(frozen=True)
class CompetingPair(Step):
    """A record displaces a record with the opposite gradient, with probability `rate`.

    In the direction `REMOVE` the distributions are those of two changes and of one change at this rate,
    each mixed with N(0). In the direction `ADD` the other record has no gradient: the step is `sampled`.
    """

    sampled: SampledPair
    """The Gaussian step of a record that replaces none."""

    @property
    def _log_odds(self) -> float:
        """log k; the ratio a at x = 3/2 + scale^2 log X satisfies X^2 = a X + k (a - 1)."""
        rate, scale = self.sampled.rate, self.sampled.noise.scale
        return math.log1p(-rate) - math.log(rate) - scale**-2

    def with_representable_loss(self) -> Self:
        return self.with_scale_above(MIN_COMPETING_MULTIPLIER)

    def with_scale_above(self, least: float) -> Self:
        """The pair with noise of at least this scale."""
        noise = self.sampled.noise
        return self if noise.scale >= least else replace(self, sampled=self.sampled.with_scale(least))

    @property
    def total_variation(self) -> float:
        return self.sampled.total_variation

    @property
    def loss_rounding(self) -> float:
        # _log_odds has an error of 64 units, unless its exponential is negligible
        return 256 * UNIT

    @property
    def ratio_range(self) -> tuple[float, float]:
        if (log_odds := self._log_odds) < -1200:
            return -math.inf, math.inf
        return -math.log((1 + math.hypot(1.0, math.exp(-log_odds / 2))) / 2) - 1e-9, math.inf

    def loss_range(self, direction: Direction) -> tuple[float, float]:
        if direction is Direction.ADD:
            return self.sampled.loss_range(direction)
        return super().loss_range(direction)

    def log_ratio(self, outcomes: Array) -> Array:
        scale, rate = self.sampled.noise.scale, self.sampled.rate
        two, one = ((outcomes - k / 2 / scale) * (k / scale) for k in (2, 1))
        return log_mixture_ratio_absolute(rate, two) - log_mixture_ratio_absolute(rate, one)

    def privacy_loss(self, direction: Direction, outcomes: Array) -> Array:
        if direction is Direction.ADD:
            return self.sampled.privacy_loss(direction, outcomes)
        return super().privacy_loss(direction, outcomes)

    def outcome_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        if direction is Direction.ADD:
            return self.sampled.outcome_quantiles(direction, tail)
        noise, rate = self.sampled.noise, self.sampled.rate
        parts = [(0.0, 1 - rate), (2 / noise.scale, rate)]
        return mixture_quantiles([part for part in parts if part[1]], noise.inverse_survival, tail)

    def loss_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        if direction is Direction.ADD:
            return self.sampled.loss_quantiles(direction, tail)
        # the loss increases only from below 3/2 on, and is negative there
        top = max(self.outcome_quantiles(direction, tail)[1], 2 / self.sampled.noise.scale)
        return max(self.ratio_range[0], -MAX_LOSS), float(self.log_ratio(np.array([top]))[0])

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        if direction is Direction.ADD:
            return self.sampled.loss_quadrature(direction, tail)
        noise, weight = self.sampled.noise.quadrature(tail)
        log_stay, log_move = log_weights(self.sampled.rate)
        places = np.append(noise, noise + 2 / self.sampled.noise.scale)
        return self.log_ratio(places), np.append(weight + log_stay, weight + log_move)

    def _outcome_masses(self, direction: Direction, ratios: Array) -> tuple[Array, Array, Array]:
        if direction is Direction.ADD:
            return self.sampled._outcome_masses(direction, ratios)
        scale = self.sampled.noise.scale
        high, low = self._invert_ratio(ratios)
        two, one = (self._masses(high, low, change) for change in (2, 1))
        survival_error = self.sampled.noise.survival_error(np.maximum(np.abs(high), np.abs(low)) / scale)
        return two, one, 4 * UNIT * (2 * survival_error + 16)

    def _masses(self, high: Array, low: Array, change: int) -> Array:
        """Masses by loss, of outcomes between the `high` ones and of outcomes between the `low` ones."""
        noise, total = self.sampled.noise, np.zeros(len(high) + 1)
        for place, share in ((0, 1 - self.sampled.rate), (change, self.sampled.rate)):
            upper = noise_masses(noise, (high - place) / noise.scale)
            lower = noise_masses(noise, (low[::-1] - place) / noise.scale)[::-1]
            upper[0] = max(0.0, upper[0] - lower[1:].sum())
            upper[1:] += lower[1:]
            total += share * upper
        return total

    def _invert_ratio(self, ratios: Array) -> tuple[Array, Array]:
        """The largest outcomes with log-likelihood ratios `ratios`, and the smallest (maybe -inf)."""
        scale, losses = self.sampled.noise.scale, np.maximum(ratios, self.ratio_range[0])
        inner = np.exp(np.minimum(self._log_odds + math.log(4) - losses, 700.0)) * -np.expm1(-losses)
        root = np.sqrt(np.maximum(1 + inner, 0.0))
        high = 1.5 + scale**2 * (losses + np.log((1 + root) / 2))
        with np.errstate(divide="ignore"):
            # (1 - root) / 2 without cancellation
            share = np.log(np.maximum(-inner, 0.0) / (1 + root) / 2)
        return high, np.minimum(1.5 + scale**2 * (losses + share), high)


@dataclass(frozen=True)
class TwoSidedLaw(Step):
    """Positive losses of one pair; negative losses mirror another's, with the two laws exchanged.

    The remaining mass has loss zero. Both pairs are in the direction `REMOVE`.
    """

    above: SampledPair | CompetingPair
    below: SampledPair

    def with_representable_loss(self) -> Self:
        below = self.below.with_representable_loss()
        if isinstance(self.above, CompetingPair):
            return replace(self, above=self.above.with_scale_above(_MIN_UPPER_MULTIPLIER), below=below)
        return replace(self, above=self.above.with_representable_loss(), below=below)

    @property
    def total_variation(self) -> float:
        return max(self.above.total_variation, self.below.total_variation)

    @property
    def loss_rounding(self) -> float:
        return max(self.above.loss_rounding, self.below.loss_rounding)

    @property
    def ratio_range(self) -> tuple[float, float]:
        return -self.below.ratio_range[1], self.above.ratio_range[1]

    def log_ratio(self, outcomes: Array) -> Array:
        # only used for the origin of a grid, which is the atom at loss zero
        return 0 * outcomes

    def outcome_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        return self.above.outcome_quantiles(direction, tail)

    def _pairs(self, direction: Direction) -> Sequence[SampledPair | CompetingPair]:
        """The pairs of the positive and of the negative losses in a direction."""
        return (self.above, self.below) if direction is Direction.REMOVE else (self.below, self.above)

    def loss_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        # the tail of the second distribution is smaller than that of the first
        high, low = (pair.loss_quantiles(Direction.REMOVE, tail)[1] for pair in self._pairs(direction))
        return -low, high

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        parts = []
        for pair in self._pairs(direction):
            losses, weights = pair.loss_quadrature(Direction.REMOVE, tail)
            positive = losses > 0
            parts.append((losses[positive], weights[positive]))
        (losses, weights), (lost, weighted) = parts
        mirrored = weighted - lost
        rest = 1 - np.exp(weights).sum() - np.exp(mirrored).sum()
        atom = math.log(max(float(rest), 1e-300))
        return np.concatenate([losses, -lost, [0.0]]), np.concatenate([weights, mirrored, [atom]])

    def _outcome_masses(self, direction: Direction, ratios: Array) -> tuple[Array, Array, Array]:
        above, below = ratios[ratios >= 0], -ratios[ratios < 0][::-1]
        first, second, error = _tail_cells(self.above, above)
        mirrored_second, mirrored_first, mirrored_error = _tail_cells(self.below, below)
        atom = max(0.0, 1 - first.sum() - mirrored_first.sum())
        # the cell with loss zero contains the innermost part of each side
        masses = []
        for inner, outer in ((first, mirrored_first), (second, mirrored_second)):
            middle = inner[0] + outer[0] + atom
            masses.append(np.concatenate([outer[:0:-1], [middle], inner[1:]]))
        return masses[0], masses[1], np.concatenate([mirrored_error[::-1], error])


def _tail_cells(pair: SampledPair | CompetingPair, cuts: Array) -> tuple[Array, Array, Array]:
    """Probabilities of a pair between zero, increasing cuts and infinity, and rounding errors."""
    first, second, error = pair._outcome_masses(Direction.REMOVE, np.append(0.0, cuts))
    return first[1:], second[1:], error[1:]


@dataclass(frozen=True)
class MixedLaw(Step):
    """Mixture of two steps, with a public random choice of the step: `second` has weight `share`."""

    first: SampledPair | GroupLaw
    second: TwoSidedLaw
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
    def loss_rounding(self) -> float:
        return max(part.loss_rounding for part, _ in self._parts)

    @property
    def ratio_range(self) -> tuple[float, float]:
        lows, highs = zip(*(part.ratio_range for part, _ in self._parts), strict=True)
        return min(lows), max(highs)

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
