"""The Gaussian mechanism without sampling, in closed form (Balle and Wang 2018, Theorem 8).

Steps that take every record are one such mechanism together: two unit normals, `separation`
apart, whose square adds over the steps.
"""

import math

import numpy as np
from scipy.special import erfcx, log_ndtr

from hush.accounting.pld.privacy_loss import UNIT, Array
from hush.core.guarantee import Bound

# Below this separation the two terms of Theorem 8 nearly cancel; their difference is integrated.
_CLOSE = 0.1
# Beyond this one epsilon exceeds the largest number; a smaller separation gives the lower bound.
_FARTHEST = 1e150
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(8)


def delta(separation: float, epsilon: float) -> Bound:
    """Bounds on delta at `epsilon`."""
    if separation == 0:
        return Bound(lower=0.0, upper=0.0)
    if separation > _FARTHEST:
        return Bound(lower=delta(_FARTHEST, epsilon).lower, upper=1.0)
    moved = 16 * UNIT * (epsilon + separation**2)
    value, error = _log_delta(separation, epsilon + moved)
    lower = math.exp(value - error)
    value, error = _log_delta(separation, max(0.0, epsilon - moved))
    return Bound(lower=lower, upper=min(1.0, math.exp(value + error)))


def epsilon(separation: float, delta: float) -> Bound:
    """Bounds on epsilon at `delta`."""
    if separation == 0:
        return Bound(lower=0.0, upper=0.0)
    if separation > _FARTHEST:
        return Bound(lower=epsilon(_FARTHEST, delta).lower, upper=math.inf)
    return Bound(
        lower=_crossing(separation, math.log(delta), -1),
        upper=_crossing(separation, math.log(delta), 1),
    )


def _crossing(separation: float, target: float, sign: int) -> float:
    """The epsilon at which log delta falls to `target`, rounded down or up by `sign`."""

    def exceeds(epsilon: float) -> bool:
        value, error = _log_delta(separation, epsilon)
        return value + sign * error > target

    if not exceeds(0.0):
        return 0.0
    low, high = 0.0, separation * (separation / 2 + math.sqrt(-2 * target))
    # Bisection to the last bit.
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if exceeds(middle) else (low, middle)
    end = high if sign > 0 else low
    return max(0.0, end + sign * 16 * UNIT * (end + separation**2))


def _log_delta(separation: float, epsilon: float) -> tuple[float, float]:
    """log(Phi(a) - exp(epsilon) Phi(a - separation)), and how far rounding may have moved it."""
    a = separation / 2 - epsilon / separation
    # exp(epsilon) phi(a - separation) = phi(a), so delta is phi(a) times a difference of Mills
    # ratios m(t) = Phi(-t) / phi(t), whose derivative is t m(t) - 1.
    log_density = -a * a / 2 - math.log(2 * math.pi) / 2
    if separation < _CLOSE:
        t = -a + separation * (1 + _NODES) / 2
        fall = 1 - t * _mills(t)
        value = log_density + math.log(separation / 2 * float(_WEIGHTS @ fall))
        return value, 64 * UNIT * (1 + a * a)
    near = float(log_ndtr(a))
    far = log_density + math.log(float(_mills(np.array(separation - a))))
    share = -math.expm1(far - near)
    error = 64 * UNIT * (1 + abs(near) + (1 + a * a) * math.exp(far - near))
    return near + math.log(share), error / share


def _mills(t: Array) -> Array:
    return math.sqrt(math.pi / 2) * np.asarray(erfcx(t / math.sqrt(2)))
