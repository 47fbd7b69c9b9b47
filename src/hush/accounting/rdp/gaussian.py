"""Rényi divergences of one step, and the epsilon they give."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from hush.accounting.mechanism import SampledGaussian
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
from hush.core.errors import InvalidValue

Conversion = Literal["improved", "mironov"]

# Orders with longer sums or integrals than this get an upper bound instead of the value.
_LONGEST = 100_000

ORDERS: Array = np.concatenate(
    [1 + np.geomspace(1e-4, 0.9, 25), np.arange(2, 65), np.round(np.geomspace(70, 1e6, 60))]
)


def divergence(step: SampledGaussian, orders: npt.ArrayLike) -> Array:
    """The Rényi divergence of one step at each order: the larger of the two directions.

    **Guarantee.** Exact to 1e-9 relatively, or larger than that; never smaller. At rate 1 it is
    order / (2 multiplier^2). Mironov, Talwar and Zhang 2019 prove that the direction computed here
    (the record is removed) is the larger one.
    """
    wanted = np.atleast_1d(np.asarray(orders, dtype=float))
    for order in wanted.flat:
        if not order > 1 or not math.isfinite(order):
            raise InvalidValue(
                f"orders={order:g} must be a finite number > 1: Rényi divergence bounds the privacy "
                "loss only above order 1. Pass e.g. orders=[2, 4, 8]."
            )
    moments = np.array([_log_moment(step, order) for order in wanted.flat])
    # Rounding: the sums have positive terms, each off by the error of log-factorials; and a moment
    # of almost no information may come out below zero.
    outward = OUTWARD + 16 * UNIT * gammaln(wanted + 1)
    values: Array = np.maximum(outward * moments.reshape(wanted.shape) / (wanted - 1), 0.0)
    return values


def epsilon(
    steps: Mapping[SampledGaussian, int],
    delta: float,
    *,
    orders: Sequence[float] | Array = ORDERS,
    conversion: Conversion = "improved",
) -> float:
    """The least epsilon that Rényi divergences at `orders` give for all steps together.

    `improved` is Canonne, Kamath and Steinke 2020, Proposition 12; `mironov` is Mironov 2017,
    Proposition 3, which papers often quote.
    """
    order = np.asarray(orders, dtype=float)
    total = np.zeros(len(order))
    for step, count in steps.items():
        if count:
            total = total + count * divergence(step, order)
    return rdp_to_epsilon(total, order, delta, conversion)


def rdp_to_epsilon(
    divergences: Array, orders: Array, delta: float, conversion: Conversion = "improved"
) -> float:
    """The least epsilon at `delta` that Rényi divergences at these orders give."""
    return max(0.0, float((_known(divergences) + conversion_term(orders, delta, conversion)).min()))


def conversion_term(orders: Array, delta: float, conversion: Conversion = "improved") -> Array:
    """What is added to a divergence at each order to make an epsilon at `delta`; may be below 0."""
    added: Array = -math.log(delta) / (orders - 1)
    if conversion == "improved":
        added = added + np.log1p(-1 / orders) - np.log(orders) / (orders - 1)
    return added


def rdp_to_delta(divergences: Array, orders: Array, epsilon: float) -> float:
    """The least delta at `epsilon` that Rényi divergences at these orders give.

    The improved conversion solved for delta. The total variation distance, which delta never
    exceeds, is also at most sqrt(D/2) and sqrt(1 - exp(-D)) (Pinsker; Bretagnolle and Huber).
    """
    divergences = _known(divergences)
    exponents = (orders - 1) * (divergences - epsilon + np.log1p(-1 / orders)) - np.log(orders)
    least = float(divergences.min())
    distance = min(math.sqrt(least / 2), math.sqrt(-math.expm1(-least)))
    return min(distance, math.exp(min(0.0, float(exponents.min()))))


def _known(divergences: Array) -> Array:
    """The divergences, where one that could not be computed bounds nothing."""
    return np.where(np.isnan(divergences), np.inf, divergences)


def _log_moment(step: SampledGaussian, order: float) -> float:
    """log E ((with the record) / (without))^order, the expectation being without."""
    exponent = 0.5 / step.multiplier / step.multiplier if step.multiplier > 1e-150 else math.inf
    if step.rate == 1 or math.isinf(exponent):
        return order * (order - 1) * exponent
    if order == round(order) and order <= _LONGEST:
        return _binomial(step, int(order), exponent)
    spacing = min(1.0, step.multiplier) * step.multiplier / 2
    length = (order + 30 * step.multiplier) / spacing
    if order <= 1000 and length <= _LONGEST:
        return _integral(step, order, exponent, spacing)
    return _bound(step, order, exponent)


def _binomial(step: SampledGaussian, order: int, exponent: float) -> float:
    """The moment at a whole order: binomial weights sum to one, so 1 is taken from every term."""
    k = np.arange(2, order + 1, dtype=float)
    log_weight = log_binomial_in_turn(order, k, log_weights(step.rate))
    log_terms = log_weight + log_expm1(k * (k - 1) * exponent)
    return float(np.logaddexp(0.0, np.logaddexp.reduce(log_terms)))


def _integral(step: SampledGaussian, order: float, exponent: float, spacing: float) -> float:
    """The moment by the trapezoid rule, which converges like exp(-2 pi^2 / spacing) here.

    E (1 + w)^a - 1 = E [(1 + w)^a - 1 - a w], since the ratio's mean is 1: all terms positive.
    The integrand is analytic within pi multiplier^2 of the real line.
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


def _bound(step: SampledGaussian, order: float, exponent: float) -> float:
    """No less than the moment: Minkowski's inequality, or convexity between whole orders."""
    minkowski = order * float(log_mixture(log_weights(step.rate), 0.0, (order - 1) * exponent))
    below = math.floor(order)
    if below + 1 > _LONGEST:
        return minkowski
    at_below = _binomial(step, below, exponent) if below > 1 else 0.0
    share = order - below
    convex = (1 - share) * at_below + share * _binomial(step, below + 1, exponent)
    return min(minkowski, convex)
