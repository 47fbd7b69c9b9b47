"""Rényi divergence between a one-dimensional noise law and its shift."""

import math
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from hush.accounting.numerics import OUTWARD, Array, log1mexp, log_binomial, log_weights_numpy
from hush.accounting.rdp.quadrature import log_moment_minus_one
from hush.core.ranges import Range, number
from hush.core.value import Value

_ORDER = Range(
    above=1,
    why="Rényi divergence bounds the privacy loss only above order 1",
    example=2.0,
)
_SHIFT = Range(why="a record moves the output by a finite amount or nothing is private", example=1.0)


@dataclass(frozen=True, kw_only=True)
class NoiseDensity(Value):
    """Density proportional to exp(-(|x| / scale)^beta): Laplace at 1; at 2 normal, of deviation
    scale / sqrt(2)."""

    beta: float = field(
        metadata=number(
            at_least=1,
            why="below 1 the density is not log-concave and no bound here is proved",
            example=2.0,
        )
    )
    scale: float = field(metadata=number(above=0, why="without noise nothing is private", example=1.0))

    @property
    def fisher(self) -> float:
        """The Fisher information of its location: beta^2 Gamma(2 - 1/beta) / Gamma(1/beta) / scale^2."""
        ratio = gammaln(2 - 1 / self.beta) - gammaln(1 / self.beta)
        return float(self.beta**2 * math.exp(ratio) / self.scale**2)


def profile(law: NoiseDensity, orders: npt.ArrayLike, shifts: npt.ArrayLike) -> Array:
    """D_a between the law at 0 and at a shift, orders and shifts broadcast against each other.

    **Guarantee.** Never below the true value, and within 1e-8 of it relatively (closed forms at
    beta 1 and 2, certified quadrature else). The two directions are equal: x -> shift - x swaps the
    laws. docs/guarantees/coordinate-wise.md.

    >>> float(profile(Law(beta=2, scale=1), 3, 0.5).round(9))
    0.75
    """
    order, shift = checked(orders, shifts)
    return sampled(law, 1.0, order, shift)


def checked(orders: npt.ArrayLike, shifts: npt.ArrayLike) -> tuple[Array, Array]:
    """Orders and absolute shifts, each in its range, broadcast to one shape."""
    order, shift = np.broadcast_arrays(
        np.asarray(orders, dtype=float), np.abs(np.asarray(shifts, dtype=float))
    )
    for wrong in order[~((order > 1) & np.isfinite(order))][:1]:
        _ORDER.check("orders", wrong)
    for wrong in shift[~np.isfinite(shift)][:1]:
        _SHIFT.check("shifts", wrong)
    return order, shift


def sampled(law: NoiseDensity, rate: float, order: Array, shift: Array) -> Array:
    """D_a of (1 - rate) law(0) + rate law(shift) from law(0); entries checked and of one shape."""
    in_units = (shift / law.scale).ravel()
    moments = _log_moments(law.beta, rate, order.astype(float).tobytes(), in_units.tobytes())
    return OUTWARD * moments.reshape(order.shape) / (order - 1)


@lru_cache(maxsize=512)
def _log_moments(beta: float, rate: float, orders: bytes, shifts: bytes) -> Array:
    """log E r^a at each pair; the arrays come as bytes so that a repeated question costs nothing."""
    order, shift = np.frombuffer(orders), np.frombuffer(shifts)
    found = np.zeros(len(order))
    moved = shift > 0
    # Below this shift the quadratic bound is as good as the value, and powers could underflow.
    tiny = moved & (shift * np.maximum(order, 4 - order) * beta < 1e-9)
    found[tiny] = curvature(NoiseDensity(beta=beta, scale=1.0), rate, order[tiny], shift[tiny])
    found[tiny] *= shift[tiny] ** 2 * (order[tiny] - 1)
    rest = moved & ~tiny
    if rate == 1 and beta == 2:
        found[rest] = order[rest] * (order[rest] - 1) * shift[rest] ** 2
    elif rate == 1 and beta == 1:
        found[rest] = np.logaddexp(0.0, _log_excess_laplace(order[rest], shift[rest]))
    elif rest.any():
        found[rest] = np.logaddexp(0.0, log_moment_minus_one(beta, rate, order[rest], shift[rest]))
    found.flags.writeable = False
    return found


def curvature(law: NoiseDensity, rate: float, order: Array, reach: Array) -> Array:
    """K with D_a <= K shift^2 at all shifts up to `reach` (+inf where `reach` is too large for it).

    As reach -> 0 it is a rate^2 / 2 times the Fisher information, the true limit.
    docs/guarantees/coordinate-wise.md, "Near zero".
    """
    limit = order * rate**2 * law.fisher / 2
    if law.beta == 2 and rate == 1:
        return limit
    power = 2 - 1 / law.beta
    if rate == 1:
        wide = (1 + reach / law.scale / 2) ** (law.beta - 1)
        e = (order - 0.5) * law.beta * reach / law.scale * wide
        e = np.minimum(e, 1.0)
        rise = (np.exp(e) * _room(e) ** -power + np.exp(-e) * (1 + e) ** -power) / 2
    else:
        e = np.minimum(np.maximum(order, 4 - order) * law.beta * reach / law.scale, 1.0)
        rise = np.exp(e) * _room(e) ** -power
    return np.where(e < 1, limit * rise * OUTWARD, np.inf)


def least_bend(law: NoiseDensity, reach: float) -> float:
    """c >= 0 with M''(s) >= a (a - 1) c at shifts s up to `reach` and every order a, M = E r^a.

    About the Fisher information if `reach` is small; 0 below beta = 2, where nothing is proved.
    docs/guarantees/coordinate-wise.md, "Bent at least so much".
    """
    beta, d = law.beta, reach / law.scale / 2
    if beta < 2 or d * beta >= 1:
        return 0.0

    def moment(power: float) -> float:
        return math.exp(gammaln((power + 1) / beta) - gammaln(1 / beta))

    fisher = moment(2 * beta - 2)
    wide = (1 + d) ** (beta - 2) * (fisher + moment(3 * beta - 4))
    lost = (beta - 1) * d**2 * (moment(2 * beta - 4) + beta / 2 * wide)
    kink = 2 * d ** (2 * beta - 1) * beta / math.gamma(1 / beta)
    return float(max(0.0, beta**2 * (fisher - lost - kink)) / law.scale**2 / OUTWARD)


def _room(e: Array) -> Array:
    room: Array = np.maximum(1 - e, 1e-100)
    return room


def nearly_quadratic(law: NoiseDensity, rate: float, order: float) -> float:
    """A shift up to which `curvature` is within 5e-5 of its limit, relatively; about the largest one."""
    if rate == 1:
        # the rise is 1 + (1/2 + g + g (g + 1) / 2) e^2 + ..., g = 2 - 1/beta < 2
        return 3e-3 * law.scale / law.beta / (order - 0.5)
    return 2e-5 * law.scale / law.beta / max(order, 4 - order)


def _log_excess_laplace(order: Array, shift: Array) -> Array:
    """log(E r^a - 1): Mironov 2017, Proposition 6, as a sum of positive terms."""
    up = np.log(order) + _log_expm1_less(shift * (order - 1))
    down = np.log(order - 1) + _log_expm1_less(-shift * order)
    return np.logaddexp(up, down) - np.log(2 * order - 1)


def _log_expm1_less(values: Array) -> Array:
    """log(exp(y) - 1 - y) without cancellation or overflow."""
    series = np.ones_like(values)
    for k in range(9, 2, -1):
        series = 1 + values / k * series
    small = np.abs(values) < 0.1
    near = 2 * np.log(np.abs(values)) - math.log(2) + np.log(np.where(small, series, 1.0))
    capped = np.clip(values, -1e300, 50.0)
    far = np.log(np.where(small, 1.0, np.expm1(capped) - capped)) + np.maximum(values - 50.0, 0.0)
    return np.where(small, near, far)


RATE = number(
    above=0,
    at_most=1,
    why="it is the probability that a coordinate takes part",
    example=0.5,
)


@dataclass(frozen=True, kw_only=True)
class CoordinateRDP(Value):
    """What one coordinate costs: noise of a law, and a shift that is there with probability `rate`."""

    law: NoiseDensity
    rate: float = field(default=1.0, metadata=RATE)

    def __call__(self, orders: npt.ArrayLike, shifts: npt.ArrayLike) -> Array:
        """The larger of the two D_a between law(0) and (1 - rate) law(0) + rate law(shift).

        **Guarantee.** Never below the true value, and within 1e-8 of it relatively. The larger is
        always that of the mixture from law(0), for every symmetric law, rate and order:
        docs/guarantees/coordinate-wise.md, "Which direction". Convex in the shift at rate 1 and at
        whole orders; not proved elsewhere.

        >>> from hush.accounting.rdp.profile import Law
        >>> sampled = Profile(law=Law(beta=2, scale=1), rate=0.5)
        >>> bool(sampled(3, 0.5) < Profile(law=Law(beta=2, scale=1))(3, 0.5))
        True
        """
        order, shift = checked(orders, shifts)
        whole = bool((order == np.round(order)).all()) and float(order.max(initial=0)) <= 1000
        if self.law.beta == 2 and self.rate < 1 and whole:
            return self._binomial(order, shift / self.law.scale)
        return sampled(self.law, self.rate, order, shift)

    def curvature(self, order: Array, reach: Array) -> Array:
        """K such that the profile is at most K shift^2 up to `reach`."""
        return curvature(self.law, self.rate, order, reach)

    def nearly_quadratic(self, order: float) -> float:
        """A shift up to which `curvature` hardly grows with its reach."""
        return nearly_quadratic(self.law, self.rate, order)

    def least_bend(self, order: float, reach: float) -> float:
        """m >= 0 with M'' >= m at shifts up to `reach`, M = exp((order - 1) D); 0 if none is proved."""
        return order * (order - 1) * least_bend(self.law, reach) if self.rate == 1 else 0.0

    @property
    def quadratic(self) -> bool:
        """Whether the profile is a multiple of shift^2 at every order."""
        return self.law.beta == 2 and self.rate == 1

    def convex(self, order: Array) -> bool:
        """Whether the profile is proved convex in the shift at all these orders."""
        return self.rate == 1 or bool((order == np.round(order)).all())

    def _binomial(self, order: Array, shift: Array) -> Array:
        """Normal noise at whole orders; the binomial weights sum to 1, which is taken from each term."""
        found = np.zeros(order.shape)
        for a in np.unique(order):
            v = np.arange(2, a + 1)
            log_weight = log_binomial(a, v, log_weights_numpy(self.rate))
            mine = order == a
            power = v * (v - 1) * shift[mine][:, None] ** 2
            terms = log_weight + power + log1mexp(-power)
            found[mine] = np.logaddexp(0.0, np.logaddexp.reduce(terms, axis=1)) / (a - 1)
        return OUTWARD * found
