"""The meaning of a guarantee: its privacy profile, its trade-off curve and the rates of attacks.

**Guarantee.** docs/guarantees/risk.md: no test has errors below the trade-off curve's lower end; some
test has errors below its upper end; and mu-GDP holds for all tests whose error rates are both at least
1e-10.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr, ndtri

from hush.accounting.attacker import ApproximateDP, AttackBounds, Attacker
from hush.accounting.epsilon import Dimension, compose, deltas
from hush.accounting.numerics import UNIT, Array
from hush.accounting.pld import analytic_gaussian
from hush.core.guarantee import RECORD, Adjacency, Guarantee
from hush.core.plan import Plan

# The profile ends at this delta, and at this epsilon where that comes first.
_MIN_DELTA, _MAX_EPSILON = 1e-12, 700.0
_POINTS = 129


@dataclass(frozen=True, kw_only=True)
class PrivacyProfile:
    """Bounds on delta at increasing epsilons; read the other way, on epsilon at a delta.

    Args:
        epsilons: From 0 to where delta is next to nothing.
        lower: No smaller delta holds.
        upper: This delta holds.
    """

    epsilons: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]


def privacy_profile(
    counts: Mapping[Plan, int], dimension: Dimension = None, adjacency: Adjacency = RECORD
) -> PrivacyProfile:
    """The privacy profile of a composition of plans, from epsilon 0 to the one at delta 1e-12.

    **Guarantee.** As for `hush.epsilon`: the true delta lies between the two.
    """
    end = compose(counts, _MIN_DELTA, dimension, adjacency).epsilon.upper
    epsilons = np.linspace(0.0, min(end, _MAX_EPSILON), _POINTS if end > 0 else 1).tolist()
    bounds = deltas(counts, epsilons, dimension, adjacency)
    return PrivacyProfile(
        epsilons=tuple(epsilons),
        lower=tuple(bound.lower for bound in bounds),
        upper=tuple(bound.upper for bound in bounds),
    )


MIN_ERROR_RATE = 1e-10
"""Gaussian DP is for tests with error rates from here on: subsampled steps have no such mu beyond."""
# Outweighs the rounding of the normal distribution's quantiles, and of a few operations up to 1.
_OUTWARD, _ROUNDING = 1 + 1e-9, 32 * UNIT
_RATES = np.unique(np.concatenate([np.geomspace(1e-6, 0.5, 60), np.linspace(0.0, 1.0, 61)]))


@dataclass(frozen=True, kw_only=True)
class TradeOffCurve:
    """False negative rates of the best test at each false positive rate, and the Gaussian DP below them.

    Args:
        false_positive_rates: From 0 to 1, dense where they are small.
        lower: No test misses fewer members: this curve holds.
        upper: No larger curve holds.
        gaussian: The curve of mu-GDP, below `lower` down to error rates of 1e-10.
        mu: Distance of two unit normals that are as easy to tell apart as neighbours, or easier.
        regret: Distance of mu-GDP from the true curve: the curve moved down and left by it is below that
            of mu-GDP (Kaissis et al. 2024; Gomez et al. 2025). An upper bound.
    """

    false_positive_rates: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]
    gaussian: tuple[float, ...]
    mu: float
    regret: float


def trade_off_curve(profile: PrivacyProfile) -> TradeOffCurve:
    """The trade-off curve of a privacy profile, with mu of Gaussian DP and its regret."""
    slopes = np.exp(np.array(profile.epsilons))
    deltas = np.array(profile.upper)
    corners = _lowest_profile(slopes, np.array(profile.lower), deltas)
    mu = gaussian_mu(profile)
    return TradeOffCurve(
        false_positive_rates=tuple(_RATES.tolist()),
        lower=tuple(np.maximum(_envelope(slopes, deltas) - _ROUNDING, 0.0).tolist()),
        upper=tuple(np.minimum(_envelope(*corners) + _ROUNDING, 1 - _RATES).tolist()),
        gaussian=tuple(ndtr(-ndtri(_RATES) - mu).tolist() if mu < math.inf else [0.0] * len(_RATES)),
        mu=mu,
        regret=_regret(mu, *corners),
    )


def gaussian_mu(profile: PrivacyProfile) -> float:
    """The smallest mu of which Gaussian DP follows from the profile, for error rates of 1e-10 or more.

    The profile's tangents bound the trade-off curve by a polygon. The curve of mu-GDP is convex, so it
    is below the polygon if it is so at the corners.
    """
    slopes, deltas = _convex(np.exp(np.array(profile.epsilons)), np.array(profile.upper))
    # where each tangent has both error rates alike; the largest is on the polygon
    even = float(((1 - deltas) / (1 + slopes)).max()) - _ROUNDING
    if even <= MIN_ERROR_RATE:
        return math.inf
    between = -np.diff(deltas) / np.diff(slopes)
    rates = np.concatenate([[MIN_ERROR_RATE, even], between])
    rates = rates[(rates >= MIN_ERROR_RATE) & (rates <= even)]
    power = (deltas[:, None] + slopes[:, None] * rates).min(axis=0) * (1 + _ROUNDING)
    # two unit normals at this distance have a test of this power
    mus = ndtri(np.minimum(power, 1 - MIN_ERROR_RATE)) - ndtri(rates)
    return max(0.0, float(mus.max()) * _OUTWARD)


def _convex(slopes: Array, deltas: Array) -> tuple[Array, Array]:
    """The profile's points on their lower convex hull, above which a convex profile never is."""
    hull: list[int] = []
    for k in range(len(slopes)):
        while len(hull) > 1:
            i, j = hull[-2], hull[-1]
            before = (deltas[j] - deltas[i]) / (slopes[j] - slopes[i])
            if (deltas[k] - deltas[j]) / (slopes[k] - slopes[j]) > before:
                break
            hull.pop()
        hull.append(k)
    return slopes[hull], deltas[hull]


def _lowest_profile(slopes: Array, lower: Array, upper: Array) -> tuple[Array, Array]:
    """Corners of a polygon that a convex profile between `lower` and `upper` is nowhere below.

    Between two points it is above the lines through two neighbours on either side, drawn on.
    """
    steps = np.diff(slopes)
    # how fast it may fall after each point, at most; at slope 1 the errors of the best test are no more
    # than 1 - delta together, and alike in both directions
    fall = np.append((1 - lower[0]) / 2, (upper[:-1] - lower[1:]) / steps)
    # how fast it certainly falls before each point
    rise = np.append(np.maximum(lower[1:-1] - upper[2:], 0.0) / steps[1:], 0.0)
    corners, heights = [slopes[0]], [lower[0]]
    for k, step in enumerate(steps):
        left, right = lower[k], lower[k + 1] + rise[k] * step
        speed = fall[k] - rise[k]
        place = min(max((left - right) / speed, 0.0), step) if speed > 0 else 0.0
        for at in (0.0, place, step):
            corners.append(slopes[k] + at)
            heights.append(max(left - fall[k] * at, lower[k + 1] + rise[k] * (step - at)))
    corners.append(slopes[-1])
    heights.append(0.0)
    return np.array(corners), np.maximum(np.array(heights) - _ROUNDING, 0.0)


def _envelope(slopes: Array, deltas: Array) -> Array:
    """The largest of the tangents with these slopes and their mirror images, at `_RATES`."""
    steep = (1 - deltas[:, None] - slopes[:, None] * _RATES).max(axis=0)
    flat = ((1 - deltas[:, None] - _RATES) / slopes[:, None]).max(axis=0)
    highest: Array = np.maximum(np.maximum(steep, flat), 0.0)
    return highest


def _regret(mu: float, slopes: Array, deltas: Array) -> float:
    """The largest of (delta of mu-GDP - delta) / (1 + slope): an upper bound, from lower ends of delta.

    Between two corners the numerator is convex, and so the largest ratio is at a corner.
    """
    if math.isinf(mu):
        return 1.0
    gaussian = [analytic_gaussian.delta(mu, math.log(slope)).upper for slope in slopes]
    gaps = (np.array(gaussian) - deltas) / (1 + slopes)
    return max(0.0, float(gaps.max()) * _OUTWARD + _ROUNDING)


FALSE_POSITIVE_RATES = (0.1, 0.01, 0.001)
EVEN_PRIOR = 0.5
PRIORS = tuple(percent / 100 for percent in range(1, 100))
"""Probabilities of membership beforehand at which the chance of a right guess is given."""


@dataclass(frozen=True, kw_only=True)
class AttackRates:
    """Upper bounds on what the best membership attack achieves.

    Args:
        advantage: Largest true positive rate less false positive rate.
        posterior: Chance that a guess is right, from even odds.
        true_positive_rates: The largest at false positive rates of 10%, 1% and 0.1%, in this order.
    """

    advantage: float
    posterior: float
    true_positive_rates: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """A guarantee in terms of attacks, with the curves behind it.

    Args:
        attack: Rates that hold of the composition, from its privacy profile.
        from_epsilon: Rates that follow from its epsilon and delta alone: never smaller.
        posteriors: Chance that a guess is right, at each of `PRIORS`.
        profile: Delta at each epsilon, with both ends.
        trade_off: Trade-off curve with both ends, and mu of Gaussian DP with its regret.
    """

    attack: AttackRates
    from_epsilon: AttackRates
    posteriors: tuple[float, ...]
    profile: PrivacyProfile
    trade_off: TradeOffCurve


def explain(
    guarantee: Guarantee,
    counts: Mapping[Plan, int],
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
) -> Explanation:
    """What a guarantee of a composition of plans means to an attacker."""
    own = (guarantee.epsilon.upper, guarantee.delta)
    profile = privacy_profile(counts, dimension, adjacency)
    implied = ApproximateDP([own, *zip(profile.epsilons, profile.upper, strict=True)])
    return Explanation(
        attack=_smaller(attack_rates(Attacker(counts, dimension, adjacency)), attack_rates(implied)),
        from_epsilon=attack_rates(ApproximateDP([own])),
        posteriors=tuple(implied.posteriors(PRIORS)),
        profile=profile,
        trade_off=trade_off_curve(profile),
    )


def attack_rates(attack: AttackBounds) -> AttackRates:
    """Bounds on the rates of the best attack."""
    return AttackRates(
        advantage=attack.advantage,
        posterior=attack.posterior(EVEN_PRIOR),
        true_positive_rates=tuple(attack.true_positive_rate(rate) for rate in FALSE_POSITIVE_RATES),
    )


def _smaller(first: AttackRates, second: AttackRates) -> AttackRates:
    """The smaller of two bounds on each rate.

    A profile may be loose near epsilon 0 alone; then its other points say more: risk.md, 6.
    """
    rates = zip(first.true_positive_rates, second.true_positive_rates, strict=True)
    return AttackRates(
        advantage=min(first.advantage, second.advantage),
        posterior=min(first.posterior, second.posterior),
        true_positive_rates=tuple(map(min, rates)),
    )
