"""Gaussian mechanism without subsampling, in closed form (Balle and Wang 2018, Theorem 8).

A composition of full-batch Gaussian steps is a Gaussian mechanism with parameter `mu` of Gaussian DP,
the distance of two unit normal distributions. mu^2 is additive under composition.
"""

import math

import numpy as np
from scipy.special import erfcx, log_ndtr

from hush.accounting.numerics import UNIT, Array, bisect
from hush.core.guarantee import Bound

# Below this mu the two terms of Theorem 8 cancel, so their difference is computed as an integral.
_SMALL_MU = 0.1
# Above this mu epsilon overflows, and the lower bound is computed at this mu.
_MAX_MU = 1e150
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


def delta(mu: float, epsilon: float) -> Bound:
    """Bounds on delta of mu-Gaussian DP at `epsilon`."""
    if mu == 0:
        return Bound(lower=0.0, upper=0.0)
    if mu > _MAX_MU:
        return Bound(lower=delta(_MAX_MU, epsilon).lower, upper=1.0)
    rounding = 16 * UNIT * (epsilon + mu**2)
    value, error = _log_delta(mu, epsilon + rounding)
    lower = math.exp(value - error)
    value, error = _log_delta(mu, max(0.0, epsilon - rounding))
    return Bound(lower=lower, upper=min(1.0, math.exp(value + error)))


def epsilon(mu: float, delta: float) -> Bound:
    """Bounds on epsilon of mu-Gaussian DP at `delta`."""
    if mu == 0:
        return Bound(lower=0.0, upper=0.0)
    if mu > _MAX_MU:
        return Bound(lower=epsilon(_MAX_MU, delta).lower, upper=math.inf)
    return Bound(lower=_crossing(mu, math.log(delta), -1), upper=_crossing(mu, math.log(delta), 1))


def _crossing(mu: float, target: float, sign: int) -> float:
    """Epsilon with log delta = `target`, rounded down or up by `sign`."""

    def exceeds(epsilon: float) -> bool:
        value, error = _log_delta(mu, epsilon)
        return value + sign * error > target

    if not exceeds(0.0):
        return 0.0
    low, high = bisect(exceeds, 0.0, mu * (mu / 2 + math.sqrt(-2 * target)))
    end = high if sign > 0 else low
    return max(0.0, end + sign * 16 * UNIT * (end + mu**2))


def _log_delta(mu: float, epsilon: float) -> tuple[float, float]:
    """log(Phi(a) - exp(epsilon) Phi(a - mu)), and a bound on its rounding error."""
    a = mu / 2 - epsilon / mu
    # exp(epsilon) phi(a - mu) = phi(a), so delta is phi(a) times a difference of Mills ratios
    # m(t) = Phi(-t) / phi(t), with derivative t m(t) - 1.
    log_density = -a * a / 2 - math.log(2 * math.pi) / 2
    if mu < _SMALL_MU:
        t = -a + mu * (1 + _NODES) / 2
        fall = 1 - t * _mills(t)
        value = log_density + math.log(mu / 2 * float(_WEIGHTS @ fall))
        return value, 64 * UNIT * (1 + a * a)
    log_first = float(log_ndtr(a))
    log_second = log_density + math.log(float(_mills(np.array(mu - a))))
    share = -math.expm1(log_second - log_first)
    error = 64 * UNIT * (1 + abs(log_first) + (1 + a * a) * math.exp(log_second - log_first))
    return log_first + math.log(share), error / share


def _mills(t: Array) -> Array:
    return math.sqrt(math.pi / 2) * np.asarray(erfcx(t / math.sqrt(2)))
