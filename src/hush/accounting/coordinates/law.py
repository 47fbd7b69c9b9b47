"""Privacy loss law of a jump diffusion under Poisson sampling of records.

The diffusion's log-likelihood ratio W is normal around a compound Poisson number of jumps. Given W,
every number of jumps has the ratio exp(W), so that W itself is what is cut: nothing is inverted.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hush.accounting.numerics import OUTWARD, log_mixture_ratio_absolute
from hush.accounting.pld.laws import GaussianLaw
from hush.accounting.pld.privacy_loss import (
    UNIT,
    Array,
    CellMasses,
    Direction,
    MixtureLaw,
    by_loss,
    noise_masses,
    unsampled_ratio,
)

_NORMAL = GaussianLaw(1.0)
# Numbers of jumps of a smaller chance in all, under either law, count as infinite losses.
_BEYOND = 1e-25
# Cells of an estimate of the loss.
_QUADRATURE = 1201


@dataclass(frozen=True)
class JumpDiffusionLaw(MixtureLaw):
    """exp(W) against 1, where a record takes part with chance `rate`.

    Args:
        rate: Chance that the record takes part.
        variance: Variance of the normal part of W.
        jump: Unit of the jumps.
        jumps: Jump sizes in that unit, and the mean number of each without the record.
        killed: Exponent of the chance of no infinite loss, with the record.
    """

    rate: float
    variance: float
    jump: float
    jumps: tuple[tuple[int, float], ...]
    killed: float

    @property
    def scale(self) -> float:
        return math.sqrt(self.variance)

    @property
    def max_privacy_loss(self) -> float:
        return math.inf

    @property
    def total_variation(self) -> float:
        below = self._masses(np.zeros(1))
        # of a sum of positive terms each; the difference of the two has their absolute error
        distance = below[0][1] - below[1][1] + self._infinite
        return min(1.0, self.rate * (float(distance) + 1e-12) * OUTWARD)

    @property
    def loss_rounding(self) -> float:
        # of the places of the components, beside that of the subsampled ratio
        return 32 * UNIT * (2 + self.variance + abs(self._drift) + self.jump * len(self._weights[0]))

    def privacy_loss(self, direction: Direction, noise: Array) -> Array:
        centre = self._places[int(np.argmax(self._weights[1]))]
        return self._loss(direction, centre + self.scale * noise)

    def loss_range(self, direction: Direction) -> tuple[float, float]:
        low = math.log1p(-self.rate) if self.rate < 1 else -math.inf
        return (low, math.inf) if direction is Direction.REMOVE else (-math.inf, -low)

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        cuts = np.linspace(*self._ratio_quantiles(direction, tail), _QUADRATURE)
        diffused, without = (law[1:-1] for law in self._masses(cuts))
        if direction is Direction.REMOVE:
            without = self.rate * diffused + (1 - self.rate) * without
        losses = self._loss(direction, (cuts[1:] + cuts[:-1]) / 2)
        return losses, np.log(np.maximum(without, 1e-300))

    def loss_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        edges = np.array(self._ratio_quantiles(direction, tail))
        low, high = sorted(self._loss(direction, edges).tolist())
        return low, high

    def _ratio_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        """Two values of W with at most `tail` of the finite mass of a direction's first law outside."""
        parts = self._components(direction)
        edges = []
        for place, share in parts:
            part = max(tail / (2 * len(parts)) / share, 1e-300)
            if part < 0.5:
                reach = self.scale * _NORMAL.inverse_survival(part)
                edges += [place - reach, place + reach]
        return min(edges), max(edges)

    def cell_masses(self, direction: Direction, cuts: Array) -> CellMasses:
        forward = direction is Direction.REMOVE
        ratios = unsampled_ratio(self.rate, cuts if forward else -cuts[::-1])
        diffused, without = self._masses(ratios)
        with_record = self.rate * diffused + (1 - self.rate) * without
        # numbers of jumps that are left out count as an infinite loss in either direction
        if forward:
            with_record[-1] += self.rate * self._infinite + _BEYOND
        else:
            without[0] += _BEYOND
        # The component farthest from a cut has the smallest tail there, and the largest error.
        places = self._places
        farthest = ratios - places[0] if forward else places[-1] + self.variance - ratios
        survival_error = _NORMAL.survival_error(np.maximum(farthest / self.scale, 0.0))
        rounding = 4 * UNIT * (4 * survival_error + 16 * len(places) + 64)
        return by_loss(direction, with_record, without, rounding)

    def _loss(self, direction: Direction, ratios: Array) -> Array:
        loss = log_mixture_ratio_absolute(self.rate, ratios)
        return loss if direction is Direction.REMOVE else -loss

    @property
    def _infinite(self) -> float:
        """Chance of an infinite loss of a record that takes part."""
        return -math.expm1(-self.killed)

    @property
    def _drift(self) -> float:
        return -self.killed - sum(mean * math.expm1(size * self.jump) for size, mean in self.jumps)

    @property
    def _weights(self) -> tuple[Array, Array]:
        """Chances of each number of units jumped, with the record and without it."""
        tilted = tuple((size, mean * math.exp(size * self.jump)) for size, mean in self.jumps)
        with_record, without = _compound_poisson(tilted), _compound_poisson(self.jumps)
        length = max(len(with_record), len(without))
        first, second = (np.pad(law, (0, length - len(law))) for law in (with_record, without))
        return math.exp(-self.killed) * first, second

    @property
    def _places(self) -> Array:
        """Means of W without the record, by the number of units jumped."""
        jumped: Array = np.arange(len(self._weights[0]), dtype=float) * self.jump
        return jumped + (self._drift - self.variance / 2)

    def _components(self, direction: Direction) -> list[tuple[float, float]]:
        """Means and shares of the normal components of a direction's first law."""
        diffused, without = self._weights
        places = self._places
        stay = 1 - self.rate if direction is Direction.REMOVE else 1.0
        parts = list(zip(places.tolist(), (stay * without).tolist(), strict=True))
        if direction is Direction.REMOVE:
            moved = (places + self.variance).tolist()
            parts += zip(moved, (self.rate * diffused).tolist(), strict=True)
        return [part for part in parts if part[1] > _BEYOND]

    def _masses(self, ratios: Array) -> tuple[Array, Array]:
        """Masses of W below, between and above the `ratios`, with the record taking part and without."""
        diffused, without = np.zeros(len(ratios) + 1), np.zeros(len(ratios) + 1)
        for place, first, second in zip(self._places, *self._weights, strict=True):
            diffused += first * noise_masses(_NORMAL, (ratios - place - self.variance) / self.scale)
            without += second * noise_masses(_NORMAL, (ratios - place) / self.scale)
        return diffused, without


@lru_cache(maxsize=64)
def _compound_poisson(jumps: tuple[tuple[int, float], ...]) -> Array:
    """Chances of 0, 1, 2, ... units jumped, but for a chance of `_BEYOND` in all."""
    law = np.ones(1)
    for size, mean in jumps:
        weight, number, spaced = math.exp(-mean), 0, []
        while number <= mean or weight * (number + 1) / (number + 1 - mean) > _BEYOND / len(jumps) / 2:
            spaced += [weight] + [0.0] * (size - 1)
            number += 1
            weight *= mean / number
        law = np.convolve(law, spaced)
    return law
