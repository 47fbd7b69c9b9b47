"""Normal laws on a fixed support, one number at a time, in units of the deviation.

What each outcome weighs at a location, and the Rényi divergence between two locations: sums of terms
that are not negative, in logarithms.
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
    """The normal law itself: every location costs the same."""

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        return np.broadcast_to(order * shift**2 / 2 * (1 + 8 * UNIT), location.shape)

    def information(self, location: Array) -> Array:
        return np.ones(location.shape)


@dataclass(frozen=True, eq=False)
class Atoms(Support):
    """Only which of some intervals the draw is in is told; `cuts` are the ends between them.

    One cut at zero is the sign; cuts half-way between levels are rounding to the nearest level.
    """

    cuts: Array

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        excess = np.full(location.shape, -np.inf)
        for low, high in self._intervals():
            first = log_mass(low - location, high - location)
            second = log_mass(low - location - shift, high - location - shift)
            excess = np.logaddexp(excess, weighed(first, second, order))
        return _capped(excess, shift, order)

    def information(self, location: Array) -> Array:
        total = np.zeros(location.shape)
        for low, high in self._intervals():
            a, b = low - location, high - location
            total += np.exp(2 * _log_difference(log_density(a), log_density(b)) - log_mass(a, b))
        return np.minimum(total, 1.0)

    def _intervals(self) -> "list[tuple[float, float]]":
        ends = [-math.inf, *map(float, self.cuts), math.inf]
        return list(itertools.pairwise(ends))


@dataclass(frozen=True)
class Rectified(Support):
    """Draws outside [-bound, bound] are moved to the nearer end."""

    bound: float

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        bound, moved = self.bound, location + shift
        excess = np.logaddexp(
            weighed(log_ndtr(-bound - location), log_ndtr(-bound - moved), order),
            weighed(log_ndtr(location - bound), log_ndtr(moved - bound), order),
        )
        return _capped(np.logaddexp(excess, self._inside(location, shift, order)), shift, order)

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
        most = np.maximum(np.maximum(power, first), second)
        most = np.where(np.isneginf(most), 0.0, most)
        sizes = np.abs(lift) + np.abs(most) + np.abs(most - lift) + order * np.abs(shift)
        error = 16 * UNIT * (1 + np.where(np.isfinite(sizes), sizes, 0.0))
        with np.errstate(divide="ignore"):
            total = np.exp(power - most) + np.exp(second - most) - np.exp(first - most)
            return np.asarray(most + np.log(np.maximum(total, 0.0) + error))

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
    """Draws outside [-bound, bound] are not made: the law is conditioned on the support."""

    bound: float

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        # Reflected so that the location is on the right: everything is then measured from that end.
        side = np.where(location < 0, -1.0, 1.0)
        outside, moved = side * location - self.bound, side * shift
        here, there = self._bent(outside, outside), self._bent(outside + moved, outside)
        beyond = self._bent(outside - (order - 1) * moved, outside)
        found = there - here + (beyond - here) / (order - 1)
        found += np.where(outside > 0, 0.0, order * moved**2 / 2)
        sizes = np.abs(here) + np.abs(there) + np.abs(beyond) / (order - 1) + order * moved**2
        found = np.maximum(found, 0.0) + 16 * UNIT * (1 + sizes) / min(1.0, self.bound)
        # Popoviciu: no law on [-bound, bound] has a variance above bound^2.
        return np.minimum(found, order * shift**2 / 2 * min(1.0, self.bound**2) * (1 + 8 * UNIT))

    def _bent(self, outside: Array, origin: Array) -> Array:
        """log of the normal mass of the support; where `origin` > 0, without its part -outside^2 / 2.

        The parabola adds a (shift)^2 / 2 to what is wanted, exactly; without it nothing large is left to
        cancel, however far outside the location is.
        """
        width = 2 * self.bound
        right = np.maximum(outside, -5.0)
        mills = erfcx(right / math.sqrt(2))
        lost = np.log(erfcx((right + width) / math.sqrt(2)) / mills) - width * right - width**2 / 2
        far = np.log(mills / 2) + log1mexp(lost)
        mass = log_mass(outside, outside + width)
        bent = np.where(outside > -5, far, mass + outside**2 / 2)
        return np.where(origin > 0, bent, mass)

    def information(self, location: Array) -> Array:
        outside = np.abs(location) - self.bound
        low, high = outside, outside + 2 * self.bound
        mass = log_mass(low, high)
        with np.errstate(over="ignore", invalid="ignore"):
            at_low, at_high = np.exp(log_density(low) - mass), np.exp(log_density(high) - mass)
            mean = at_low - at_high
            near = 1 + low * at_low - np.where(at_high > 0, high, 0.0) * at_high - mean**2
        found = np.where(outside > _FAR, self._variance(np.maximum(outside, _FAR)), near)
        return np.clip(found, 0.0, min(1.0, self.bound**2))

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
    most, least = log_ndtr(near), log_ndtr(far)
    return np.asarray(_log_difference(most, least))


def _log_difference(first: Array, second: Array) -> Array:
    """log |exp(first) - exp(second)|."""
    most, least = np.maximum(first, second), np.minimum(first, second)
    with np.errstate(invalid="ignore"):
        gap = np.where(np.isneginf(most), 0.0, least - most)
        return np.asarray(most + log1mexp(gap))


def log_density(x: Array) -> Array:
    return np.asarray(-(np.asarray(x) ** 2) / 2 - _LOG_2PI / 2)


def weighed(first: Array, second: Array, order: float) -> Array:
    """log of q (r^a - 1 - a (r - 1)), r = p / q, for an outcome of log-probabilities p and q.

    Rounded up: it rises with the distance of r from 1.
    """
    gone = np.isneginf(first) & np.isneginf(second)
    first, second = np.where(gone, 0.0, first), np.where(gone, 0.0, second)
    error = 8 * UNIT * (np.abs(first) + np.abs(second))
    ratio = first - second
    ratio = ratio + np.copysign(error, ratio)
    with np.errstate(divide="ignore"):
        small = np.log(
            order - 1 - order * np.exp(np.minimum(ratio, -1)) + np.exp(order * np.minimum(ratio, -1))
        )
    excess = np.where(ratio < -1, small, log_convex_remainder(np.maximum(ratio, -1.0), order))
    return np.where(gone, -np.inf, second + error + excess)


def _capped(excess: Array, shift: Array, order: float) -> Array:
    """The divergence that the log of a moment less 1 gives, and not more than the normal law's."""
    found = np.logaddexp(0.0, excess) / (order - 1) * OUTWARD
    return np.minimum(found, order * shift**2 / 2 * (1 + 8 * UNIT))
