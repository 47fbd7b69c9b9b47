"""One-dimensional normal laws on a fixed support: RDP and Fisher information, at deviation 1.

A Rényi moment is a sum of non-negative terms over the outcomes, computed in logarithms.
"""

import itertools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from scipy.special import erfcx, log_ndtr

from hush.accounting.numerics import OUTWARD, UNIT, Array, log1mexp, log_convex_remainder

_LOG_2PI = math.log(2 * math.pi)


class Support(ABC):
    """A normal law of deviation 1 that is brought into a fixed support."""

    @abstractmethod
    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        """D_a(law(location) || law(location + shift)), entry by entry.

        **Guarantee.** Never below the true value by more than rounding, which is added; never above
        what the unbounded normal law has, order * shift^2 / 2. docs/guarantees/bounded.md.
        """

    @abstractmethod
    def information(self, location: Array) -> Array:
        """The Fisher information of the location, entry by entry: between 0 and 1."""


@dataclass(frozen=True)
class Unbounded(Support):
    """The normal law itself: the divergence does not depend on the location."""

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        return np.broadcast_to(order * shift**2 / 2 * (1 + 8 * UNIT), location.shape)

    def information(self, location: Array) -> Array:
        return np.ones(location.shape)


@dataclass(frozen=True, eq=False)
class Atoms(Support):
    """A quantized normal law: the interval that the draw is in is released; `cuts` separate them.

    One cut at zero is the sign; cuts half-way between levels are rounding to the nearest level.
    """

    cuts: Array

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        excess = np.full(location.shape, -np.inf)
        for low, high in self.intervals():
            first = log_mass(low - location, high - location)
            second = log_mass(low - location - shift, high - location - shift)
            excess = np.logaddexp(excess, log_remainder_mass(first, second, order))
        return _capped_rdp(excess, shift, order)

    def information(self, location: Array) -> Array:
        total = np.zeros(location.shape)
        for low, high in self.intervals():
            a, b = low - location, high - location
            total += np.exp(2 * _log_difference(log_density(a), log_density(b)) - log_mass(a, b))
        return np.minimum(total, 1.0)

    def intervals(self) -> "list[tuple[float, float]]":
        """The ends of each interval."""
        ends = [-math.inf, *map(float, self.cuts), math.inf]
        return list(itertools.pairwise(ends))


@dataclass(frozen=True)
class Rectified(Support):
    """The rectified normal law: draws outside [-bound, bound] are moved to the nearer end."""

    bound: float

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        bound, shifted = self.bound, location + shift
        excess = np.logaddexp(
            log_remainder_mass(log_ndtr(-bound - location), log_ndtr(-bound - shifted), order),
            log_remainder_mass(log_ndtr(location - bound), log_ndtr(shifted - bound), order),
        )
        return _capped_rdp(np.logaddexp(excess, self._inside(location, shift, order)), shift, order)

    def _inside(self, location: Array, shift: Array, order: float) -> Array:
        """log of the integral of p^a q^(1-a) - q - a (p - q) over the support.

        The first term is exp(a (a-1) shift^2 / 2) times the normal mass around location - (a-1) shift.
        """
        lift = order * (order - 1) * shift**2 / 2
        centre = location - (order - 1) * shift
        power = lift + log_mass(-self.bound - centre, self.bound - centre)
        first = log_mass(-self.bound - location, self.bound - location)
        second = log_mass(-self.bound - location - shift, self.bound - location - shift)
        first, second = first + math.log(order), second + math.log(order - 1)
        largest = np.maximum(np.maximum(power, first), second)
        largest = np.where(np.isneginf(largest), 0.0, largest)
        sizes = np.abs(lift) + np.abs(largest) + np.abs(largest - lift) + order * np.abs(shift)
        error = 16 * UNIT * (1 + np.where(np.isfinite(sizes), sizes, 0.0))
        with np.errstate(divide="ignore"):
            total = np.exp(power - largest) + np.exp(second - largest) - np.exp(first - largest)
            return np.asarray(largest + np.log(np.maximum(total, 0.0) + error))

    def information(self, location: Array) -> Array:
        low, high = -self.bound - location, self.bound - location
        total = np.exp(2 * log_density(low) - log_ndtr(low))
        total += np.exp(2 * log_density(high) - log_ndtr(-high))
        # the second moment of the normal law over the support
        total += np.exp(log_mass(low, high)) + low * np.exp(log_density(low))
        total -= high * np.exp(log_density(high))
        return np.asarray(np.clip(total, 0.0, 1.0))


@dataclass(frozen=True)
class Truncated(Support):
    """The truncated normal law: conditioned on [-bound, bound]."""

    bound: float

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        # Reflect the location to the right; distances are measured from the right end.
        side = np.where(location < 0, -1.0, 1.0)
        outside, move = side * location - self.bound, side * shift
        at_location = self._detrended_log_mass(outside, outside)
        at_shifted = self._detrended_log_mass(outside + move, outside)
        at_tilted = self._detrended_log_mass(outside - (order - 1) * move, outside)
        value = at_shifted - at_location + (at_tilted - at_location) / (order - 1)
        value += np.where(outside > 0, 0.0, order * move**2 / 2)
        sizes = (
            np.abs(at_location) + np.abs(at_shifted) + np.abs(at_tilted) / (order - 1) + order * move**2
        )
        value = np.maximum(value, 0.0) + 16 * UNIT * (1 + sizes) / min(1.0, self.bound)
        # Popoviciu: no law on [-bound, bound] has a variance above bound^2.
        return np.minimum(value, order * shift**2 / 2 * min(1.0, self.bound**2) * (1 + 8 * UNIT))

    def _detrended_log_mass(self, outside: Array, origin: Array) -> Array:
        """log of the normal mass of the support, plus outside^2 / 2 where `origin` > 0.

        The parabola changes the divergence by a (shift)^2 / 2 exactly; without it nothing large is left
        to cancel, however far outside the location is.
        """
        width = 2 * self.bound
        right = np.maximum(outside, -5.0)
        mills = erfcx(right / math.sqrt(2))
        log_lost = np.log(erfcx((right + width) / math.sqrt(2)) / mills) - width * right - width**2 / 2
        far = np.log(mills / 2) + log1mexp(log_lost)
        mass = log_mass(outside, outside + width)
        detrended = np.where(outside > -5, far, mass + outside**2 / 2)
        return np.where(origin > 0, detrended, mass)

    def information(self, location: Array) -> Array:
        outside = np.abs(location) - self.bound
        low, high = outside, outside + 2 * self.bound
        mass = log_mass(low, high)
        with np.errstate(over="ignore", invalid="ignore"):
            at_low, at_high = np.exp(log_density(low) - mass), np.exp(log_density(high) - mass)
            mean = at_low - at_high
            near = 1 + low * at_low - np.where(at_high > 0, high, 0.0) * at_high - mean**2
        variance = np.where(outside > _FAR, self._variance(np.maximum(outside, _FAR)), near)
        return np.clip(variance, 0.0, min(1.0, self.bound**2))

    def _variance(self, outside: Array) -> Array:
        """The variance by Gauss-Legendre, far outside, where the closed form cancels."""
        reach = np.minimum(2 * self.bound, 45 / outside)
        depth = reach[..., None] * _NODES
        weight = _WEIGHTS * np.exp(-depth * (outside[..., None] + depth / 2))
        weight /= weight.sum(-1, keepdims=True)
        mean = (weight * depth).sum(-1, keepdims=True)
        return np.asarray((weight * (depth - mean) ** 2).sum(-1))


_FAR = 6.0
_NODES, _WEIGHTS = (part / 2 for part in np.polynomial.legendre.leggauss(48))
_NODES = _NODES + 0.5


def log_mass(low: Array, high: Array) -> Array:
    """log of the normal mass between `low` and `high`, taken on the side where it is a small tail."""
    flip = low + high > 0
    near = np.where(flip, -low, high)
    far = np.where(flip, -high, low)
    largest, smallest = log_ndtr(near), log_ndtr(far)
    return np.asarray(_log_difference(largest, smallest))


def _log_difference(first: Array, second: Array) -> Array:
    """log |exp(first) - exp(second)|."""
    largest, smallest = np.maximum(first, second), np.minimum(first, second)
    with np.errstate(invalid="ignore"):
        gap = np.where(np.isneginf(largest), 0.0, smallest - largest)
        return np.asarray(largest + log1mexp(gap))


def log_density(x: Array) -> Array:
    return np.asarray(-(np.asarray(x) ** 2) / 2 - _LOG_2PI / 2)


def log_remainder_mass(first: Array, second: Array, order: float) -> Array:
    """log of q (r^a - 1 - a (r - 1)), r = p / q, for an outcome of log-probabilities `first`, `second`.

    Rounded up: it rises with the distance of r from 1.
    """
    empty = np.isneginf(first) & np.isneginf(second)
    first, second = np.where(empty, 0.0, first), np.where(empty, 0.0, second)
    error = 8 * UNIT * (np.abs(first) + np.abs(second))
    ratio = first - second
    ratio = ratio + np.copysign(error, ratio)
    with np.errstate(divide="ignore"):
        small = np.log(
            order - 1 - order * np.exp(np.minimum(ratio, -1)) + np.exp(order * np.minimum(ratio, -1))
        )
    excess = np.where(ratio < -1, small, log_convex_remainder(np.maximum(ratio, -1.0), order))
    return np.where(empty, -np.inf, second + error + excess)


def _capped_rdp(excess: Array, shift: Array, order: float) -> Array:
    """The Rényi divergence from the log of a moment less 1, capped at the normal law's."""
    value = np.logaddexp(0.0, excess) / (order - 1) * OUTWARD
    return np.minimum(value, order * shift**2 / 2 * (1 + 8 * UNIT))
