"""Rényi differential privacy of the Poisson-subsampled Gaussian mechanism."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from hush.accounting.numerics import (
    OUTWARD,
    UNIT,
    Array,
    log_binomial_in_turn,
    log_convex_remainder,
    log_expm1,
    log_mixture,
    log_weights,
)
from hush.accounting.rdp.conversion import ORDERS, rdp_to_epsilon

if TYPE_CHECKING:  # imports this module
    from hush.accounting.steps import SampledGaussian

# Orders with more terms get an upper bound instead of the exact value.
_MAX_TERMS = 100_000


def renyi_divergence(step: "SampledGaussian", orders: npt.ArrayLike) -> Array:
    """Rényi divergence of one sampled Gaussian step at each order, the larger of both directions.

    **Guarantee.** An upper bound, usually with relative error below 1e-9. At rate 1 it is order / (2
    multiplier^2) (Mironov 2017, Proposition 7). Only one direction (remove) is computed, because it is
    the larger one (Mironov, Talwar and Zhang 2019, Theorem 5).
    """
    order_array = np.atleast_1d(np.asarray(orders, dtype=float))
    moments = np.array([_log_moment(step, order) for order in order_array.flat])
    # bounds the rounding errors of sums of positive terms and of log-factorials
    outward = OUTWARD + 16 * UNIT * gammaln(order_array + 1)
    return np.asarray(np.maximum(outward * moments.reshape(order_array.shape) / (order_array - 1), 0.0))


def epsilon(steps: Mapping["SampledGaussian", int], delta: float) -> float:
    """Smallest epsilon of the composition at `delta` that is implied by Rényi divergences."""
    costs = (count * renyi_divergence(step, ORDERS) for step, count in steps.items() if count)
    return rdp_to_epsilon(sum(costs, np.zeros(len(ORDERS))), ORDERS, delta)


def _log_moment(step: "SampledGaussian", order: float) -> float:
    """log E_Q (P/Q)^order, for the distributions P with the record and Q without it."""
    exponent = 0.5 / step.multiplier / step.multiplier if step.multiplier > 1e-150 else math.inf
    if step.rate == 1 or math.isinf(exponent):
        return order * (order - 1) * exponent
    if order == round(order) and order <= _MAX_TERMS:
        return _binomial_log_moment(step, int(order), exponent)
    spacing = min(1.0, step.multiplier) * step.multiplier / 2
    length = (order + 30 * step.multiplier) / spacing
    if order <= 1000 and length <= _MAX_TERMS:
        return _trapezoid_log_moment(step, order, exponent, spacing)
    return _log_moment_bound(step, order, exponent)


def _binomial_log_moment(step: "SampledGaussian", order: int, exponent: float) -> float:
    """Log-moment at an integer order (Mironov, Talwar and Zhang 2019).

    The binomial weights sum to 1, so 1 is subtracted from every term to avoid cancellation.
    """
    k = np.arange(2, order + 1, dtype=float)
    log_weight = log_binomial_in_turn(order, k, log_weights(step.rate))
    log_terms = log_weight + log_expm1(k * (k - 1) * exponent)
    return float(np.logaddexp(0.0, np.logaddexp.reduce(log_terms)))


def _trapezoid_log_moment(
    step: "SampledGaussian", order: float, exponent: float, spacing: float
) -> float:
    """Log-moment by the trapezoid rule.

    E (1 + w)^a - 1 = E [(1 + w)^a - 1 - a w], because the mean of w is 0. All terms of this sum are
    positive. The integrand is analytic within pi multiplier^2 of the real line, so the error decreases
    like exp(-2 pi^2 / spacing).
    """
    reach = 15 * step.multiplier
    x = np.arange(-reach, order + reach, spacing)
    growth = (2 * x - 1) * exponent
    log_ratio = log_mixture(log_weights(step.rate), 0.0, growth)
    log_density = -((x / step.multiplier) ** 2) / 2 + math.log(spacing / step.multiplier)
    log_density -= math.log(2 * math.pi) / 2
    return float(
        np.logaddexp(0.0, np.logaddexp.reduce(log_density + log_convex_remainder(log_ratio, order)))
    )


def _log_moment_bound(step: "SampledGaussian", order: float, exponent: float) -> float:
    """Upper bound on the log-moment, by Minkowski's inequality or convexity between integer orders."""
    minkowski = order * float(log_mixture(log_weights(step.rate), 0.0, (order - 1) * exponent))
    below = math.floor(order)
    if below + 1 > _MAX_TERMS:
        return minkowski
    at_below = _binomial_log_moment(step, below, exponent) if below > 1 else 0.0
    share = order - below
    convex = (1 - share) * at_below + share * _binomial_log_moment(step, below + 1, exponent)
    return min(minkowski, convex)
