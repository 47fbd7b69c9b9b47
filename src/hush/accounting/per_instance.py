"""Per-instance RDP and Fisher information of Gaussian noise with bounded support.

The results depend on the records and are **sensitive**: publishing one would be a release that is not
accounted for. This module does not print, log or store them.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import erfcx, log_ndtr

from hush.accounting.epsilon import checked_orders, rdp
from hush.accounting.numerics import (
    OUTWARD,
    UNIT,
    Array,
    log1mexp,
    log_convex_remainder,
    log_difference,
    log_normal_mass,
)
from hush.accounting.rdp.gaussian import renyi_divergence
from hush.accounting.steps import SampledGaussian
from hush.clipping import L2, L2Linf, Linf
from hush.core.errors import InvalidValue, Unproved
from hush.core.parts import Always, Noise
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.core.value import as_floats, check_kind
from hush.noise import Gaussian, Quantized, Rectified, StochasticSign, Truncated
from hush.noise.bounded import largest_variance
from hush.sampling import FullBatch

_CHUNK = 2**16
"""Coordinates per chunk; memory is limited to about a dozen arrays of this length."""
_LOG_2PI = math.log(2 * math.pi)


def individual_rdp(
    plan: Plan, location: npt.ArrayLike, orders: npt.ArrayLike, change: npt.ArrayLike | None = None
) -> Array:
    """Per-instance Rényi divergence of one step of `plan` at each order (sensitive).

    Args:
        plan: Plan with full batches; `L2`, `Linf` or `L2Linf` clipping; Gaussian noise, with or without
            bounded support; and release rule `Always`, or `Selective` with public test results.
        location: Clipped sum of the private records.
        orders: Rényi orders, each above 1.
        change: Difference between a neighbour's sum and `location`: a vector, or one row per neighbour,
            which gives one row of results per neighbour. By default, any record may be added or removed.
            For a selective trial, the change by one record.

    **Guarantee** (per-instance). An upper bound for both directions, and at most the bound for all
    records, `hush.rdp(plan, orders)`: docs/guarantees/bounded.md. A selective trial adds the cost of its
    test: docs/guarantees/selective.md, section 9.

    >>> import hush
    >>> plan = hush.plans.rectified(clip_norm=1.0, multiplier=1.0, bound=1.0)
    >>> [round(float(hush.individual_rdp(plan, [at], orders=[2])[0]), 4) for at in (0.0, 6.0)]
    [0.8978, 0.0036]
    """
    check_kind("plan", plan, Plan)
    if type(plan.sampling) is not FullBatch:
        raise Unproved(
            f"sampling={type(plan.sampling).__name__} has no per-instance cost: with sampled records "
            "the sum is random. Use FullBatch (hush train: leave out --rate and --batch-size), or "
            "hush.rdp."
        )
    if type(plan.clipping) not in (L2, Linf, L2Linf):
        raise Unproved(
            f"clipping={type(plan.clipping).__name__} has no per-instance cost: the proof is for "
            "independent coordinates of the gradient. Use Linf, L2 or L2Linf, or hush.rdp."
        )
    support, scale = unit_law(plan.noise, plan.clipping.reference_norm)
    order_array, center = checked_orders(orders), as_vector("location", location)
    test, release = np.zeros(len(order_array)), plan.release
    if type(release) is Selective and release.accounting == "per-trial":
        test = renyi_divergence(SampledGaussian(release.rate, release.multiplier), order_array)
    elif type(release) is not Always:
        raise Unproved(
            f"{release} has no per-instance cost: an update that is selected among hidden "
            "trials costs more than one step and one test. Use Always, or Selective "
            'with accounting="per-trial".'
        )
    for_any = rdp(plan, order_array, len(center)) * OUTWARD
    if change is None:
        balls = plan.clipping.sensitivity(len(center))
        shift = np.broadcast_to(balls[0].max_entry / scale, center.shape)
        values = _product_rdp(support, center / scale, [shift, -shift], order_array)
        return np.asarray(np.minimum(values + test, for_any))
    changes = np.asarray(change, dtype=float)
    if changes.shape[-1:] != center.shape or changes.ndim > 2 or not np.isfinite(changes).all():
        raise InvalidValue(
            f"change of shape {changes.shape} must be {len(center)} finite numbers, or rows of them: "
            "the difference between a neighbour's sum and `location`. Pass e.g. change=-gradient.",
            key="change",
        )
    values = _product_rdp(support, center / scale, [changes / scale], order_array).T
    return np.asarray(np.minimum(values + test, for_any))


def fisher(plan: Plan, location: npt.ArrayLike) -> Array:
    """Fisher information eta^2 of one step, per coordinate of the clipped sum (sensitive).

    Args:
        plan: Plan with Gaussian noise, with or without bounded support.
        location: Clipped sum of the private records.

    **Guarantee.** Between 0 and 1/scale^2, accurate to 1e-8: docs/guarantees/fisher.md.

    >>> import hush
    >>> plan = hush.plans.truncated(clip_norm=1.0, multiplier=1.0, bound=1.0)
    >>> hush.fisher(plan, [0.0, 3.0]).round(6).tolist()
    [0.291125, 0.109583]
    """
    center = as_vector("location", location)
    check_always_released(check_kind("plan", plan, Plan))
    support, scale = unit_law(plan.noise, plan.clipping.reference_norm)
    parts = (center[start : start + _CHUNK] for start in range(0, len(center), _CHUNK))
    return np.concatenate([support.information(part / scale) / scale**2 for part in parts])


def unit_law(noise: Noise, unit: float) -> tuple["Support", float]:
    """Noise distribution in units of its standard deviation, and the standard deviation."""
    match noise:
        case Gaussian():
            return UnboundedLaw(), noise.multiplier * unit
        case Rectified():
            return RectifiedLaw(noise.bound / noise.scale), noise.scale
        case Truncated():
            return TruncatedLaw(noise.bound / noise.scale), noise.scale
        case StochasticSign():
            return Atoms(np.zeros(1)), noise.scale
        case Quantized():
            levels = np.linspace(-noise.bound, noise.bound, noise.levels) / noise.scale
            return Atoms((levels[1:] + levels[:-1]) / 2), noise.scale
    raise Unproved(
        f"{type(noise).__name__} noise has no per-instance cost: the proof is for "
        "Rectified, Truncated, StochasticSign, Quantized and Gaussian. Use hush.rdp instead."
    )


def check_always_released(plan: Plan) -> None:
    """Raise `Unproved` unless every step of the plan is released."""
    if type(plan.release) is not Always:
        raise Unproved(
            f"release={type(plan.release).__name__} has no per-instance cost: the "
            "decisions of a release rule also depend on the records. Omit release=."
        )


def as_vector(name: str, value: npt.ArrayLike) -> Array:
    """Validate a finite vector."""
    values = as_floats(value)
    if values.ndim != 1 or not len(values) or not np.isfinite(values).all():
        raise InvalidValue(
            f"{name} of shape {values.shape} must be a vector of finite numbers: the privacy cost is a "
            "sum over its coordinates. Pass the clipped sum.",
            key=name,
        )
    return values


def _product_rdp(support: "Support", center: Array, shifts: Sequence[Array], orders: Array) -> Array:
    """Divergence of a product distribution, with the worst shift at each coordinate.

    Shifts are vectors, or have one row per record. The result is the larger of both directions, and its
    first axis is the orders.
    """
    totals = np.zeros((2, len(orders), *shifts[0].shape[:-1]))
    length = max(1, _CHUNK * len(center) // shifts[0].size)
    for start in range(0, len(center), length):
        moves = [shift[..., start : start + length] for shift in shifts]
        chunk = np.broadcast_to(center[start : start + length], moves[0].shape)
        for k, order in enumerate(orders):
            pairs = [
                (support.divergence(chunk, move, order), support.divergence(chunk + move, -move, order))
                for move in moves
            ]
            totals[:, k] += np.maximum.reduce(pairs).sum(-1)
    return np.asarray(totals.max(0) * OUTWARD)


@dataclass(frozen=True)
class UnboundedLaw:
    """Standard normal distribution.

    **Guarantee**, also for the distributions below. `divergence(location, shift, order)` is an upper
    bound on D_a(law(location) || law(location + shift)), including rounding errors, and at most
    order * shift^2 / 2 (docs/guarantees/bounded.md). `information` is the Fisher information of the
    location.
    """

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        return np.broadcast_to(order * shift**2 / 2 * (1 + 8 * UNIT), location.shape)

    def information(self, location: Array) -> Array:
        return np.ones(location.shape)


@dataclass(frozen=True, eq=False)
class Atoms:
    """Quantized normal distribution: releases only the interval of the draw; `cuts` are the boundaries.

    One cut at zero gives the sign. Cuts half-way between levels give rounding to the nearest level.
    """

    cuts: Array

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        excess = np.full(location.shape, -np.inf)
        for low, high in self.intervals():
            first = log_normal_mass(low - location, high - location)
            second = log_normal_mass(low - location - shift, high - location - shift)
            excess = np.logaddexp(excess, log_remainder_mass(first, second, order))
        return _capped_rdp(excess, shift, order)

    def information(self, location: Array) -> Array:
        total = np.zeros(location.shape)
        for low, high in self.intervals():
            a, b = low - location, high - location
            total += np.exp(2 * log_difference(log_density(a), log_density(b)) - log_normal_mass(a, b))
        return np.minimum(total, 1.0)

    def intervals(self) -> list[tuple[float, float]]:
        """Ends of each interval."""
        return list(itertools.pairwise([-math.inf, *map(float, self.cuts), math.inf]))


@dataclass(frozen=True)
class RectifiedLaw:
    """Rectified normal distribution: draws are clamped to [-bound, bound]."""

    bound: float

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        bound, shifted = self.bound, location + shift
        excess = np.logaddexp(
            log_remainder_mass(log_ndtr(-bound - location), log_ndtr(-bound - shifted), order),
            log_remainder_mass(log_ndtr(location - bound), log_ndtr(shifted - bound), order),
        )
        # log of the integral of p^a q^(1-a) - q - a (p - q) over the support; the first term is exp(a
        # (a-1) shift^2 / 2) times the probability of the support under mean location - (a-1) shift
        lift = order * (order - 1) * shift**2 / 2
        centre = location - (order - 1) * shift
        power = lift + log_normal_mass(-bound - centre, bound - centre)
        first = log_normal_mass(-bound - location, bound - location)
        second = log_normal_mass(-bound - location - shift, bound - location - shift)
        first, second = first + math.log(order), second + math.log(order - 1)
        largest = np.maximum(np.maximum(power, first), second)
        largest = np.where(np.isneginf(largest), 0.0, largest)
        sizes = np.abs(lift) + np.abs(largest) + np.abs(largest - lift) + order * np.abs(shift)
        error = 16 * UNIT * (1 + np.where(np.isfinite(sizes), sizes, 0.0))
        with np.errstate(divide="ignore"):
            total = np.exp(power - largest) + np.exp(second - largest) - np.exp(first - largest)
            inside = largest + np.log(np.maximum(total, 0.0) + error)
        return _capped_rdp(np.logaddexp(excess, inside), shift, order)

    def information(self, location: Array) -> Array:
        low, high = -self.bound - location, self.bound - location
        total = np.exp(2 * log_density(low) - log_ndtr(low))
        total += np.exp(2 * log_density(high) - log_ndtr(-high))
        # second moment of the normal distribution on the support
        total += np.exp(log_normal_mass(low, high)) + low * np.exp(log_density(low))
        total -= high * np.exp(log_density(high))
        return np.asarray(np.clip(total, 0.0, 1.0))


@dataclass(frozen=True)
class TruncatedLaw:
    """Truncated normal distribution: conditioned on [-bound, bound]."""

    bound: float

    def divergence(self, location: Array, shift: Array, order: float) -> Array:
        # By symmetry, assume a positive location and measure distances from the right end.
        side = np.where(location < 0, -1.0, 1.0)
        outside, move = side * location - self.bound, side * shift
        at_location = self._detrended_log_mass(outside, outside)
        at_shifted = self._detrended_log_mass(outside + move, outside)
        at_tilted = self._detrended_log_mass(outside - (order - 1) * move, outside)
        value = at_shifted - at_location + (at_tilted - at_location) / (order - 1)
        value += np.where(outside > 0, 0.0, order * move**2 / 2)
        sizes = np.abs(at_location) + np.abs(at_shifted) + np.abs(at_tilted) / (order - 1)
        sizes += order * move**2
        value = np.maximum(value, 0.0) + 16 * UNIT * (1 + sizes) / min(1.0, self.bound)
        return np.minimum(value, order * shift**2 / 2 * largest_variance(self.bound) * (1 + 8 * UNIT))

    def _detrended_log_mass(self, outside: Array, origin: Array) -> Array:
        """log of the normal probability of the support, plus outside^2 / 2 if `origin` > 0.

        The added parabola changes the divergence by exactly a shift^2 / 2. It avoids cancellation of
        large terms far outside the support.
        """
        width = 2 * self.bound
        right = np.maximum(outside, -5.0)
        mills = erfcx(right / math.sqrt(2))
        log_lost = np.log(erfcx((right + width) / math.sqrt(2)) / mills) - width * right - width**2 / 2
        far = np.log(mills / 2) + log1mexp(log_lost)
        mass = log_normal_mass(outside, outside + width)
        detrended = np.where(outside > -5, far, mass + outside**2 / 2)
        return np.where(origin > 0, detrended, mass)

    def information(self, location: Array) -> Array:
        outside = np.abs(location) - self.bound
        low, high = outside, outside + 2 * self.bound
        mass = log_normal_mass(low, high)
        with np.errstate(over="ignore", invalid="ignore"):
            at_low, at_high = np.exp(log_density(low) - mass), np.exp(log_density(high) - mass)
            mean = at_low - at_high
            near = 1 + low * at_low - np.where(at_high > 0, high, 0.0) * at_high - mean**2
        # the closed form cancels far outside the support, so use Gauss-Legendre quadrature there
        far = np.maximum(outside, _FAR)
        depth = np.minimum(2 * self.bound, 45 / far)[..., None] * _NODES
        weight = _WEIGHTS * np.exp(-depth * (far[..., None] + depth / 2))
        weight /= weight.sum(-1, keepdims=True)
        mean = (weight * depth).sum(-1, keepdims=True)
        by_quadrature = (weight * (depth - mean) ** 2).sum(-1)
        variance = np.where(outside > _FAR, by_quadrature, near)
        return np.asarray(np.clip(variance, 0.0, largest_variance(self.bound)))


Support = UnboundedLaw | Atoms | RectifiedLaw | TruncatedLaw
"""Standard normal distribution, optionally with bounded support."""
_FAR = 6.0
_NODES, _WEIGHTS = (part / 2 for part in np.polynomial.legendre.leggauss(48))
_NODES = _NODES + 0.5


def log_density(x: Array) -> Array:
    return np.asarray(-(np.asarray(x) ** 2) / 2 - _LOG_2PI / 2)


def log_remainder_mass(first: Array, second: Array, order: float) -> Array:
    """log of q (r^a - 1 - a (r - 1)), r = p / q, for log-probabilities `first` (p) and `second` (q).

    The result increases with the distance of r from 1, so r is rounded away from 1.
    """
    empty = np.isneginf(first) & np.isneginf(second)
    first, second = np.where(empty, 0.0, first), np.where(empty, 0.0, second)
    error = 8 * UNIT * (np.abs(first) + np.abs(second))
    ratio = first - second
    ratio = ratio + np.copysign(error, ratio)
    below = np.minimum(ratio, -1)
    with np.errstate(divide="ignore"):
        small = np.log(order - 1 - order * np.exp(below) + np.exp(order * below))
    excess = np.where(ratio < -1, small, log_convex_remainder(np.maximum(ratio, -1.0), order))
    return np.where(empty, -np.inf, second + error + excess)


def _capped_rdp(excess: Array, shift: Array, order: float) -> Array:
    """Rényi divergence from log(moment - 1), capped at the divergence of the normal distribution."""
    value = np.logaddexp(0.0, excess) / (order - 1) * OUTWARD
    return np.minimum(value, order * shift**2 / 2 * (1 + 8 * UNIT))
