"""Rényi divergence of an epoch in which a record takes part in one step, drawn uniformly.

Its likelihood ratio R without the record is a mean of independent log-normal variables W_i. Proofs:
docs/guarantees/random-allocation.md, section 5.
"""

import math
from functools import lru_cache

import numpy as np
from scipy.special import gammaln

from hush.accounting.numerics import OUTWARD, Array, log_expm1, log_sum_exp

# With less noise, and at higher orders, the epoch is bounded by one step with the record.
_MIN_MULTIPLIER, _MAX_ORDER = 0.1, 256
# Relative rounding of sums of positive terms in logarithms, and of the Laplace transform.
_ROUNDING = 1e-9
_ABSOLUTE = 1e-12
# Spacing of the logarithm of the Laplace variable, and its first and its largest last value.
_SPACING, _LOWEST, _HIGHEST = 0.04, -34.0, 600.0
_GAUSS: tuple[Array, Array] = np.polynomial.legendre.leggauss(8)


def renyi_divergence(steps: int, multiplier: float, orders: Array) -> Array:
    """Upper bounds on the Rényi divergence of an epoch of `steps` steps, in both directions."""
    whole = OUTWARD * orders / (2 * multiplier) / multiplier
    if multiplier < _MIN_MULTIPLIER:
        return np.asarray(whole)
    cumulants = _cumulants(steps, multiplier)
    inner = np.minimum(orders, _MAX_ORDER)
    # log-moments are convex in the order
    bound = np.interp(inner, np.arange(1.0, _MAX_ORDER + 1), cumulants)
    with np.errstate(invalid="ignore"):
        bound = np.where(orders <= _MAX_ORDER, bound / (orders - 1), np.inf)
    return np.asarray(np.minimum(np.where(np.isnan(bound), np.inf, bound) * OUTWARD, whole))


@lru_cache(maxsize=64)
def _cumulants(steps: int, multiplier: float) -> Array:
    """log E_Q[R^a] or log E_Q[R^(1-a)], whichever is larger, at orders a = 1, 2, ..."""
    remove = np.logaddexp(0.0, _log_excess_moments(steps, multiplier) + _ROUNDING)
    larger = np.maximum(remove, _log_negative_moments(steps, multiplier) + _ABSOLUTE)
    larger[0] = 0.0
    return np.asarray(larger)


def _log_excess_moments(steps: int, multiplier: float) -> Array:
    """log(E[R^a] - 1) for a = 1, 2, ...: coefficients of a power of the series sum E[W^k] z^k / k!.

    The series is exp(z) plus a part of positive coefficients, and so are its powers.
    """
    powers = np.arange(_MAX_ORDER + 1, dtype=float)
    factorials = gammaln(powers + 1)
    with np.errstate(divide="ignore"):
        excess = log_expm1(powers * (powers - 1) / (2 * multiplier) / multiplier) - factorials

    def plain(count: int) -> Array:
        return np.asarray(powers * math.log(count) - factorials)

    total, count = excess, 1
    for bit in bin(steps)[3:]:
        total = _product(plain(count), total, plain(count), total)
        count *= 2
        if bit == "1":
            total = _product(plain(count), total, plain(1), excess)
            count += 1
    return np.asarray((total + factorials - powers * math.log(steps))[1:])


def _product(one: Array, one_excess: Array, other: Array, other_excess: Array) -> Array:
    """Log-coefficients of (one + excess) (other + excess) - one other, up to the largest power."""
    both = np.logaddexp(other, other_excess)
    terms = np.full((len(one), len(one)), -np.inf)
    second = terms.copy()
    for power in range(len(one)):
        terms[power, : power + 1] = one_excess[: power + 1] + both[power::-1]
        second[power, : power + 1] = one[: power + 1] + other_excess[power::-1]
    return np.asarray(np.logaddexp(log_sum_exp(terms), log_sum_exp(second)))


def _log_negative_moments(steps: int, multiplier: float) -> Array:
    """Upper bounds on log E[R^(1-a)] for a = 1, 2, ...

    E[R^-b] = int_0^inf x^(b-1) E[exp(-x R)] dx / Gamma(b). The logarithm of the Laplace transform is
    convex, so its chords are above it.
    """
    places = np.arange(_LOWEST, min(_HIGHEST, 12 + math.log(_MAX_ORDER) + 30 / multiplier), _SPACING)
    log_transform = steps * _log_laplace(np.exp(places - math.log(steps)), multiplier)
    used = int(np.searchsorted(-log_transform, 1e4)) + 2
    places, log_transform = places[:used], log_transform[:used]
    nodes = (1 + _GAUSS[0]) / 2 * _SPACING
    weights = np.log(_GAUSS[1] / 2 * _SPACING)
    inside = places[:-1, None] + nodes
    share = np.expm1(nodes) / math.expm1(_SPACING)
    chords = log_transform[:-1, None] * (1 - share) + log_transform[1:, None] * share
    orders = np.arange(2, _MAX_ORDER + 1)
    bounds = np.zeros(_MAX_ORDER)
    # the transform at half the last place bounds the integral beyond it
    half = float(steps * _log_laplace(np.exp(places[-1:]) / 2 / steps, multiplier)[0])
    for order in orders.tolist():
        power = order - 1.0
        inner = float(log_sum_exp((power * inside + chords + weights).ravel()[None])[0])
        first = power * places[0] - math.log(power)
        squares = power / multiplier**2 + 2 * power**2 / steps / multiplier**2
        beyond = (squares + power * math.log(2) + half) / 2
        moment = np.logaddexp(np.logaddexp(inner, first) - gammaln(power), beyond)
        bounds[order - 1] = float(moment)
    return bounds


def _log_laplace(values: Array, multiplier: float) -> Array:
    """log E[exp(-u W)] at each u, by the trapezoid rule, whose error is below exp(-70)."""
    spacing = min(0.25, multiplier / 8)
    noise = np.arange(-math.ceil(38 / spacing), math.ceil(38 / spacing) + 1) * spacing
    weights = np.exp(-(noise**2) / 2) * spacing / math.sqrt(2 * math.pi)
    with np.errstate(over="ignore"):
        ratios = np.exp(noise / multiplier - 0.5 / multiplier**2)
        result = np.empty(len(values))
        for start in range(0, len(values), 512):
            part = values[start : start + 512]
            excess = -np.expm1(-part[:, None] * ratios) @ weights
            whole = np.exp(-part[:, None] * ratios) @ weights
            small, large = np.log1p(-np.minimum(excess, 0.5)), np.log(np.maximum(whole, 1e-300))
            result[start : start + 512] = np.where(excess < 0.5, small, large)
    return result
