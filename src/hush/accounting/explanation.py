"""Interpretation of a guarantee: privacy profile, trade-off curve and attack success rates.

**Guarantee.** No test has error rates below the trade-off curve, and mu-GDP is valid for all tests with
both error rates at least 1e-10: docs/guarantees/risk.md.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from hush.accounting.attacker import ApproximateDP
from hush.accounting.epsilon import Dimension, compose, deltas
from hush.accounting.numerics import UNIT
from hush.core.guarantee import RECORD, Adjacency, Guarantee
from hush.core.plan import Plan

# The profile ends at this delta or epsilon. Its epsilons are squares of evenly spaced numbers, because
# the profile is steep near 0 for small sampling rates.
_MIN_DELTA, _MAX_EPSILON = 1e-12, 700.0
_POINTS = 257
MIN_ERROR_RATE = 1e-10
"""Smallest error rate for mu-GDP: for subsampled steps, no mu is valid for all tests."""
# Bounds on the rounding errors of normal quantiles, and of a few operations on numbers up to 1.
_OUTWARD, _ROUNDING = 1 + 1e-9, 32 * UNIT
# Smallest difference of slopes for which the intersection of two tangents is accurate to 1e-9.
_MIN_GAP = 1e-6
_RATES = np.unique(np.concatenate([np.geomspace(1e-6, 0.5, 60), np.linspace(0.0, 1.0, 61)]))
FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)


@dataclass(frozen=True, kw_only=True)
class PrivacyProfile:
    """Certified bounds on delta at increasing epsilons, from 0 up to a negligible delta."""

    epsilons: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TradeOffCurve:
    """False negative rate of the best test at each false positive rate."""

    false_positive_rates: tuple[float, ...]
    lower: tuple[float, ...]
    """Lower bound on the false negative rate of every test."""
    gaussian: tuple[float, ...]
    """Curve of mu-GDP, which is below `lower` for error rates of at least 1e-10."""
    mu: float


@dataclass(frozen=True, kw_only=True)
class AttackRates:
    """Upper bounds on the advantage, accuracy at even prior odds, and true positive rates of attacks."""

    advantage: float
    posterior: float
    true_positive_rates: tuple[float, ...]
    """One rate for each of `FALSE_POSITIVE_RATES`."""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Attack bounds of a guarantee, with its privacy profile and trade-off curve."""

    attack: AttackRates
    from_epsilon: AttackRates
    """Weaker bounds that follow from epsilon and delta alone."""
    profile: PrivacyProfile
    trade_off: TradeOffCurve


def explain(
    guarantee: Guarantee,
    counts: Mapping[Plan, int],
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
) -> Explanation:
    """Attack bounds for a composition of plans and its guarantee."""
    own = (guarantee.epsilon.upper, guarantee.delta)
    profile = privacy_profile(counts, dimension, adjacency)
    attack, from_epsilon = (
        AttackRates(
            advantage=bounds.advantage,
            posterior=bounds.success,
            true_positive_rates=tuple(map(bounds.true_positive_rate, FALSE_POSITIVE_RATES)),
        )
        for bounds in map(
            ApproximateDP, ([own, *zip(profile.epsilons, profile.upper, strict=True)], [own])
        )
    )
    return Explanation(
        attack=attack, from_epsilon=from_epsilon, profile=profile, trade_off=trade_off_curve(profile)
    )


def privacy_profile(
    counts: Mapping[Plan, int], dimension: Dimension = None, adjacency: Adjacency = RECORD
) -> PrivacyProfile:
    """Privacy profile of a composition of plans, from epsilon 0 to the epsilon at delta 1e-12."""
    end = min(compose(counts, _MIN_DELTA, dimension, adjacency).epsilon.upper, _MAX_EPSILON)
    epsilons = (end * np.linspace(0.0, 1.0, _POINTS if end > 0 else 1) ** 2).tolist()
    bounds = deltas(counts, epsilons, dimension, adjacency)
    return PrivacyProfile(
        epsilons=tuple(epsilons),
        lower=tuple(bound.lower for bound in bounds),
        upper=tuple(bound.upper for bound in bounds),
    )


def trade_off_curve(profile: PrivacyProfile) -> TradeOffCurve:
    """Trade-off curve of a privacy profile: the maximum of its tangents and their reflections."""
    slopes, deltas = np.exp(np.array(profile.epsilons)), np.array(profile.upper)
    steep = (1 - deltas[:, None] - slopes[:, None] * _RATES).max(axis=0)
    flat = ((1 - deltas[:, None] - _RATES) / slopes[:, None]).max(axis=0)
    mu = gaussian_mu(profile)
    return TradeOffCurve(
        false_positive_rates=tuple(_RATES.tolist()),
        lower=tuple(np.maximum(np.maximum(steep, flat) - _ROUNDING, 0.0).tolist()),
        gaussian=tuple(ndtr(-ndtri(_RATES) - mu).tolist() if mu < math.inf else [0.0] * len(_RATES)),
        mu=mu,
    )


def gaussian_mu(profile: PrivacyProfile) -> float:
    """Smallest mu of Gaussian DP that the profile implies, for error rates of 1e-10 or more.

    The tangents bound the trade-off curve by a polygon, and the curve of mu-GDP is convex, so it is
    enough to compare the vertices.
    """
    slopes, deltas = np.exp(np.array(profile.epsilons)), np.array(profile.upper)
    # the lower convex hull of the points bounds the convex profile from above
    hull: list[int] = []
    for k in range(len(slopes)):
        if hull and slopes[k] - slopes[hull[-1]] < _MIN_GAP:
            continue
        while len(hull) > 1:
            i, j = hull[-2], hull[-1]
            before = (deltas[j] - deltas[i]) / (slopes[j] - slopes[i])
            if (deltas[k] - deltas[j]) / (slopes[k] - slopes[j]) > before:
                break
            hull.pop()
        hull.append(k)
    slopes, deltas = slopes[hull], deltas[hull]
    # point with equal error rates on each tangent; the largest one is on the polygon
    even = float(((1 - deltas) / (1 + slopes)).max()) - _ROUNDING
    if even <= MIN_ERROR_RATE:
        return math.inf
    between = -np.diff(deltas) / np.diff(slopes)
    rates = np.concatenate([[MIN_ERROR_RATE, even], between])
    rates = rates[(rates >= MIN_ERROR_RATE) & (rates <= even)]
    power = (deltas[:, None] + slopes[:, None] * rates).min(axis=0) * (1 + _ROUNDING)
    # distance of two unit normal distributions at which a test has this power
    mus = ndtri(np.minimum(power, 1 - MIN_ERROR_RATE)) - ndtri(rates)
    return max(0.0, float(mus.max()) * _OUTWARD)
