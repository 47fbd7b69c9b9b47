"""Elementary functions in log space, each with a bound on its rounding error.

u = `UNIT` = 2^-53 is the unit roundoff of double precision. The bounds assume that the elementary
functions of the C library, NumPy and SciPy are accurate to a few u; tests/accounting/test_numerics.py
checks every bound against 60 digits. Privacy costs are rounded outward by `OUTWARD`, which exceeds these
errors.

Some quantities have two formulas that differ in the last bits. Both are kept under distinct names,
because later versions must reproduce the privacy cost of a ledger exactly.
"""

import math
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln, log_ndtr

Array = npt.NDArray[np.float64]

UNIT = float(np.finfo(float).eps) / 2
# Relative slack for rounding of closed forms and sums of positive terms: 1e-12 is 9000 u. Integrals and
# sums over long grids use larger constants.
OUTWARD = 1 + 1e-12
# Within this distance of 0, `log_mixture_ratio_absolute` also has relative accuracy.
_NEAR_ZERO = 1e-8
# Number of bisections after which no double lies between the ends.
_ALL_HALVINGS = 2100


def log_weights(rate: float) -> tuple[float, float]:
    """log(1 - q) and log q for q = `rate`; -inf and 0 at q = 1. Error: at most 2u each."""
    return (math.log1p(-rate) if rate < 1 else -math.inf), math.log(rate)


def log_weights_numpy(rate: float) -> tuple[float, float]:
    """`log_weights` with NumPy's vector functions, which round differently."""
    with np.errstate(divide="ignore"):
        return float(np.log1p(-rate)), float(np.log(rate))


def log_mixture(weights: tuple[float, float], log_p: npt.ArrayLike, log_q: npt.ArrayLike) -> Array:
    """log((1 - q) p + q p'): log-density of a mixture, as for a subsampled mechanism.

    Error: at most 8u (1 + the largest absolute value of a finite summand in the two exponents).
    """
    return np.asarray(np.logaddexp(weights[0] + np.asarray(log_p), weights[1] + np.asarray(log_q)))


def log_mixture_ratio(
    rate: float, log_ratio: Array, weights: tuple[float, float] | None = None
) -> Array:
    """log(1 - q + q e^g) for g = `log_ratio`: the log-likelihood ratio of a subsampled step.

    Error: relative error at most 8u / (1 - q) for g < 1 (unless q g underflows), and absolute error at
    most 8u (1 + g + |log q| + |log(1 - q)|) for g >= 1. At q = 1 the result is exactly g.
    """
    if rate == 1:
        return log_ratio
    small = np.log1p(rate * np.expm1(np.minimum(log_ratio, 1.0)))
    large = log_mixture(weights or log_weights(rate), 0.0, log_ratio)
    return np.where(log_ratio < 1, small, large)


def log_mixture_ratio_absolute(rate: float, log_ratio: Array) -> Array:
    """`log_mixture_ratio` with absolute accuracy, and relative accuracy for |g| < 1e-8.

    Error: as for `log_mixture`; relative error at most 8u / (1 - q) within 1e-8 of 0.
    """
    if rate == 1:
        return log_ratio
    small = np.log1p(rate * np.expm1(np.minimum(log_ratio, _NEAR_ZERO)))
    # a sum in logarithms has an absolute error of at least u
    large = log_mixture(log_weights(rate), 0.0, log_ratio)
    return np.where(np.abs(log_ratio) < _NEAR_ZERO, small, large)


def log_binomial(n: float | Array, k: Array, weights: tuple[float, float]) -> Array:
    """log of the binomial probability of k out of n, with the two weights added first.

    Error: at most 32u (1 + log n! + (n - k) |log(1 - q)| + k |log q|).
    """
    total: Array = _log_choose(n, k)
    total += (n - k) * weights[0] + k * weights[1]
    return total


def log_binomial_in_turn(n: float | Array, k: Array, weights: tuple[float, float]) -> Array:
    """`log_binomial` with the weights added one by one, and the same error bound."""
    return np.asarray(_log_choose(n, k) + (n - k) * weights[0] + k * weights[1])


def _log_choose(n: float | Array, k: Array) -> Array:
    return np.asarray(gammaln(np.asarray(n) + 1) - gammaln(k + 1) - gammaln(n - k + 1))


def log_sum_exp(terms: Array) -> Array:
    """log of the sum of exponentials along the last axis; -inf if all terms are -inf.

    Error: at most u (16 + 4 log2(number of terms) + |value|).
    """
    top = terms.max(axis=-1, initial=-np.inf, keepdims=True)
    safe = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        result: Array = (safe + np.log(np.exp(terms - safe).sum(axis=-1, keepdims=True)))[..., 0]
    return result


def log_sum_exp_scalar(terms: Array) -> float:
    """`log_sum_exp` of a vector with at least one finite term, with the C library's logarithm."""
    top = float(terms.max())
    return top + math.log(float(np.exp(terms - top).sum()))


def log1mexp(x: Array) -> Array:
    """log(1 - e^x) for x <= 0. Error: at most 4u (1 + |value|)."""
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(-np.expm1(x)))


def log1mexp_relative(x: Array) -> Array:
    """log(1 - e^x) for x < 0 (Mächler 2012). Relative error: at most 8u, also near 0."""
    with np.errstate(divide="ignore"):  # np.where also evaluates the unused branch
        return np.where(x > -0.69, log1mexp(x), np.log1p(-np.exp(x)))


def log_expm1(x: Array) -> Array:
    """log(e^x - 1) for x >= 0, without overflow. Error: at most 8u (1 + |x| + |value|)."""
    return x + log1mexp(-x)


def log_difference(first: Array, second: Array) -> Array:
    """log |exp(first) - exp(second)|."""
    largest, smallest = np.maximum(first, second), np.minimum(first, second)
    with np.errstate(invalid="ignore"):
        gap = np.where(np.isneginf(largest), 0.0, smallest - largest)
        return np.asarray(largest + log1mexp(gap))


def log_normal_mass(low: Array, high: Array) -> Array:
    """log of the standard normal probability of [low, high], computed from the lighter tail."""
    flip = low + high > 0
    return log_difference(log_ndtr(np.where(flip, -low, high)), log_ndtr(np.where(flip, -high, low)))


def log_convex_remainder(log_ratio: Array, order: float) -> Array:
    """log(r^a - 1 - a (r - 1)) for r = exp(log_ratio), without cancellation or overflow.

    The expectation of this remainder under Q is E_Q r^a - 1, as a sum of positive terms. Error: at most
    2e-12 + 8u (1 + a |log r|), for orders a >= 1 + 1e-4 and log r >= -600.
    """
    # below exp(-600) the ratio is negligible relative to order - 1
    power, t = order - 1, np.maximum(log_ratio, -600.0)
    # r^a - 1 - a (r - 1) = r (expm1(power t) + power expm1(-t)), with a series near t = 0
    capped = np.minimum(power * t, 600.0)
    bracket = np.expm1(capped) + power * np.expm1(-t)
    series = power * order * (t**2 / 2) * (1 + (power - 1) * t / 3 * (1 + (power**2 + 1) * t**2 / 20))
    series += power * order * (power**2 - power + 1) * t**4 / 24
    bracket = np.where(np.abs(t) * order < 1e-3, series, bracket)
    with np.errstate(divide="ignore"):
        return t + (power * t - capped) + np.log(bracket)


def probability_of_any(chances: Iterable[tuple[float, int]]) -> float:
    """Upper bound on the probability that any of several independent events occurs."""
    log_none = sum(count * math.log1p(-min(chance, 1 - 2.0**-53)) for chance, count in chances)
    return min(1.0, OUTWARD * -math.expm1(log_none))


def bisect(
    attained: Callable[[float], bool],
    inside: float,
    outside: float,
    *,
    rounds: int = _ALL_HALVINGS,
    tolerance: float = 0.0,
) -> tuple[float, float]:
    """Bisection: a bracket (inside, outside) in which `attained` changes from true to false.

    `attained` is true at the returned `inside` and false at the returned `outside`, even if the function
    is not monotone, so one of them is a safe bound. The search stops after `rounds` bisections, at a gap
    of `tolerance` times max(1, |inside|), or if no double lies between the ends.
    """
    for _ in range(rounds):
        middle = (inside + outside) / 2
        close = abs(outside - inside) <= tolerance * max(1.0, abs(inside))
        if close or not min(inside, outside) < middle < max(inside, outside):
            break
        inside, outside = (middle, outside) if attained(middle) else (inside, middle)
    return inside, outside
