"""Selective trials: a sampled Gaussian step that is released if a noisy test accepts it.

**Guarantee.** All bounds are valid at every order above 1, and for adding and removing one record:
docs/guarantees/selective.md.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtr, ndtri

from hush.accounting.numerics import (
    OUTWARD,
    Array,
    bisect,
    log_convex_remainder,
    log_mixture_ratio,
    log_normal_mass,
)
from hush.accounting.pld.privacy_loss import Direction
from hush.accounting.rdp.gaussian import renyi_divergence
from hush.accounting.steps import Basis, ComposableStep, SampledGaussian
from hush.core.release import GIVEN_UP, Accounting

# Numbers of cuts near the centre of the distribution, near the order (for large orders), and elsewhere
# up to _FAR standard deviations.
_CENTRE, _PEAK, _BETWEEN = 1200, 600, 600
_FAR = 38.0
# Minimum distance of cuts in standard deviations. Probabilities between closer cuts would be dominated
# by rounding errors.
_MIN_GAP = 1e-4
# Relative rounding error of the ratio of two probabilities: docs/guarantees/selective.md, step 4.
_ROUNDING = 1e-10


@dataclass(frozen=True, eq=False)
class DominatingPair:
    """Discrete dominating pair: log-likelihood ratios (with / without the record), and log-probabilities
    without the record."""

    log_ratio: Array
    log_weight: Array
    low: float
    high: float
    """The pair dominates the step on outcomes from `low` to `high`; the caller bounds the tails."""


@lru_cache(maxsize=256)
def dominating_pair(step: SampledGaussian, order: float) -> DominatingPair:
    """Dominating pair for convex functions that grow like the ratio or its inverse to power `order`."""
    # increasing outcomes, dense around possible peaks of the integrand in both directions
    deviation = step.multiplier
    centre = deviation * math.sqrt(3) * ndtri((np.arange(_CENTRE) + 0.5) / _CENTRE)
    peak = deviation * math.sqrt(3) * ndtri((np.arange(_PEAK) + 0.5) / _PEAK)
    low, high = 1 - order - _FAR * deviation, order + _FAR * deviation
    parts = [centre, order + peak, 1 - order + peak, np.linspace(low, high, _BETWEEN)]
    cuts = np.unique(np.concatenate(parts))
    cells = np.floor((cuts - low) / (_MIN_GAP * deviation))
    cuts = cuts[np.append(True, np.diff(cells) > 1)]
    log_shift_ratio = (cuts - 0.5) / step.multiplier / step.multiplier
    without = log_normal_mass(cuts[:-1] / step.multiplier, cuts[1:] / step.multiplier)
    shifted = log_normal_mass((cuts[:-1] - 1) / step.multiplier, (cuts[1:] - 1) / step.multiplier)
    # A cell has probabilities n, n' under N(0) and N(1), and ratios e0, e1 at its ends. The chord puts
    # the weight (n' - e0 n) / (e1 - e0) on the upper end, and the remaining weight on the lower end.
    gap = np.diff(log_shift_ratio)
    log_mean = np.clip(shifted - without - log_shift_ratio[:-1], 0.0, gap)
    share = np.exp(log_mean - gap) * np.expm1(-log_mean) / np.expm1(-gap)
    rounding = np.minimum(1.0, _ROUNDING / gap)
    weight = np.full(len(cuts), -np.inf)
    weight[:-1] = without + np.log(np.minimum(1.0, 1 - share + rounding))
    weight[1:] = np.logaddexp(weight[1:], without + np.log(np.minimum(1.0, share + rounding)))
    return DominatingPair(
        log_mixture_ratio(step.rate, log_shift_ratio), weight, float(cuts[0]), float(cuts[-1])
    )


def hockey_stick(step: SampledGaussian, threshold: float) -> float:
    """Upper bound on the hockey-stick divergence E_Q[(ratio - threshold)+], threshold >= 1 - rate."""
    excess = (threshold - (1 - step.rate)) / step.rate
    if excess <= 0:
        return 1.0 - threshold
    cut = step.multiplier**2 * math.log(excess) + 0.5
    with_record = math.exp(float(log_ndtr((1 - cut) / step.multiplier)))
    without = math.exp(float(log_ndtr(-cut / step.multiplier)))
    gain, loss = step.rate * (with_record - without), (threshold - 1) * without
    return max(0.0, gain - loss) + 1e-14 * (step.rate * with_record + abs(loss))


# Largest order of the corner bounds; higher orders do not improve epsilon.
_MAX_ORDER = 1024.0
# Relative slack for rounding errors of sums over thousands of cuts.
_QUADRATURE_OUTWARD = 1 + 1e-9
_MAX_ITERATIONS = 100


@dataclass(frozen=True)
class Trial(ComposableStep):
    """Sampled Gaussian training step with a noisy test of a statistic in an interval of length 1.

    A record changes the statistic by at most 1. This is the unit of `test.multiplier` and `threshold`,
    and the threshold is relative to the middle of the interval. Depending on `accounting`, a step is one
    trial, or all trials until one is accepted.
    """

    train: SampledGaussian
    test: SampledGaussian
    threshold: float
    accounting: Accounting = "per-trial"

    @property
    def participation(self) -> float:
        if self.accounting != "per-trial":
            return 1.0
        return self.train.rate + (1 - self.train.rate) * self.test.rate

    @property
    def nontermination(self) -> float:
        return 0.0 if self.accounting == "per-trial" else GIVEN_UP

    @property
    def basis(self) -> Basis:
        return "published" if self.accounting == "published" else "proved"

    @property
    def charged_for_groups(self) -> bool:
        return self.basis == "proved"

    def rdp(self, orders: Array) -> Array:
        """Rényi divergence of a trial, or of an accepted update, at each order.

        The published accounting composes two sampled Gaussians, which is not a guarantee.
        """
        if self.accounting == "per-acceptance":
            return np.array([_per_acceptance(self, float(order)) for order in orders])
        # the decision is post-processing of the noisy statistic, so composition is an upper bound
        composed = renyi_divergence(self.train, orders) + renyi_divergence(self.test, orders)
        if self.accounting == "published":
            return composed
        return np.minimum(composed, [_per_trial(self, float(order)) for order in orders])

    @property
    def log_acceptance(self) -> tuple[float, float]:
        """Logs of the smallest and largest acceptance probabilities, m and M."""
        low, high = ((self.threshold + side) / self.test.multiplier for side in (-0.5, 0.5))
        return float(log_ndtr(low)), float(log_ndtr(high))


@lru_cache(maxsize=65536)
def _per_trial(trial: Trial, order: float) -> float:
    if order > _MAX_ORDER:
        return math.inf
    accepted = max(_log_acceptance_moment(trial, order, direction) for direction in Direction)
    excess = np.logaddexp(accepted, _log_rejection_moment(trial, order))
    return float(np.logaddexp(0.0, excess)) / (order - 1) * _QUADRATURE_OUTWARD


def _log_acceptance_moment(trial: Trial, order: float, direction: Direction) -> float:
    """log of the contribution of accepted models to the moment minus 1, for the largest corner."""
    pair = dominating_pair(trial.train, order)
    log_accepted, log_change = _acceptance_corners(trial, direction)
    log_ratio = pair.log_ratio if direction is Direction.REMOVE else -pair.log_ratio
    ratio = log_change[:, None] + log_ratio
    value = log_accepted[:, None] + log_convex_remainder(ratio, order)
    if direction is Direction.ADD:
        value += pair.log_ratio
    inside = np.logaddexp.reduce(pair.log_weight + value.max(axis=0))
    return float(np.logaddexp(inside, _log_tail_moment(trial, order, direction, 0.0)))


def _log_tail_moment(trial: Trial, order: float, direction: Direction, log_scale: float) -> float:
    """log of the contribution to the moment from outside the dominating pair's support.

    The ratio is multiplied by exp(log_scale). The bound uses g(y) <= y^a + a - 1, and t <= 1 for the
    acceptance probability t of a corner.
    """
    step, pair = trial.train, dominating_pair(trial.train, order)
    low, high, rate, deviation = pair.low, pair.high, step.rate, step.multiplier
    log_power = order * max(0.0, float(_acceptance_corners(trial, direction)[1].max()) + log_scale)
    flat = float(np.logaddexp(0.0, math.log(order - 1)))
    outside = [float(log_ndtr(place / deviation)) for place in (low, -high, 1 - high)]
    near = [log_power + flat + mass for mass in outside]
    # tail moments under Q, the distribution without the record: log E_Q[ratio^order; outcome > high] for
    # `REMOVE`, log E_Q[ratio^(1 - order); outcome < low] for `ADD`
    variance = deviation * deviation
    moment = order * (order - 1) / 2 / variance
    if direction is Direction.REMOVE:
        # above `high` the ratio is at most exp(growth) (q + (1 - q) exp(-growth at high))
        growth = min(max((high - 0.5) / variance, 0.0), 700.0)
        rest = math.log(rate + (1 - rate) * math.exp(-growth))
        tail = order * rest + moment + float(log_ndtr((order - high) / deviation))
    else:
        shifted = float(log_ndtr((low + order - 1) / deviation))
        tail = (1 - order) * math.log(rate) + moment + shifted
        if rate < 1:
            tail = min(tail, (1 - order) * math.log1p(-rate) + outside[0])
    return float(np.logaddexp.reduce([*near, log_power + tail]))


def _log_rejection_moment(trial: Trial, order: float) -> float:
    """log of the contribution y g(z/y) of rejections to the moment, with rejection probabilities y and
    z."""
    rate, change = trial.test.rate, 1.0
    if rate < 1:
        change = rate + (1 - rate) * hockey_stick(trial.train, 1 / (1 - rate))
    lowest, highest = map(math.exp, trial.log_acceptance)
    change *= highest - lowest
    least = float(ndtr(-(trial.threshold + 0.5) / trial.test.multiplier))
    if least <= 0:
        return math.inf
    up = math.log1p(change / least)
    risen = math.log(least) + log_convex_remainder(np.array([up]), order)
    fallen = math.log(least + change) + log_convex_remainder(np.array([-up]), order)
    return float(np.maximum(risen, fallen)[0])


def _acceptance_corners(trial: Trial, direction: Direction) -> tuple[Array, Array]:
    """log t and log k of the proof, at the corners of the acceptance probabilities."""
    log_least, log_most = trial.log_acceptance
    # corners (m, m), (M, M), (m, M) and (M, m) of (a', b); a = (1 - rate) a' + rate b
    log_without = np.array([log_least, log_most, log_least, log_most])
    gap = log_most - log_least
    log_change = np.append([0.0, 0.0], log_mixture_ratio(trial.test.rate, np.array([gap, -gap])))
    if direction is Direction.REMOVE:
        return log_without, log_change
    return log_without + log_change, -log_change


@lru_cache(maxsize=65536)
def _per_acceptance(trial: Trial, order: float) -> float:
    if order > _MAX_ORDER or math.exp(trial.log_acceptance[0]) <= 0:
        return math.inf
    excess = max(
        _dinkelbach_supremum(trial, order, direction, sign * math.log(scale))
        for direction, sign in ((Direction.REMOVE, -1), (Direction.ADD, 1))
        for scale in acceptance_change(trial)
    )
    return math.log1p(excess) / (order - 1) * _QUADRATURE_OUTWARD


def _dinkelbach_supremum(trial: Trial, order: float, direction: Direction, log_scale: float) -> float:
    """Upper bound on sup E[t g(ratio k scale)] / E[t], by Dinkelbach's algorithm (1967)."""
    pair = dominating_pair(trial.train, order)
    log_accepted, log_change = _acceptance_corners(trial, direction)
    removed = direction is Direction.REMOVE
    log_weight = pair.log_weight + (0 if removed else 1) * pair.log_ratio
    log_ratio = pair.log_ratio if removed else -pair.log_ratio
    ratio = log_change[:, None] + log_ratio + log_scale
    log_mass = log_accepted[:, None] + log_weight
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        mass, gain = np.exp(log_mass), np.exp(log_mass + log_convex_remainder(ratio, order))
        if not np.isfinite(gain).all():
            return math.inf
        columns = np.arange(gain.shape[1])
        worst = 0.0
        for _ in range(_MAX_ITERATIONS):
            corner = np.argmax(gain - worst * mass, axis=0)
            quotient = float(gain[corner, columns].sum() / mass[corner, columns].sum())
            if quotient <= worst * (1 + 1e-13):
                break
            worst = quotient
        rest = float((gain - worst * mass).max(axis=0).sum())
        # E[t] >= m, so the remainder of the last iteration adds at most remainder / m
        tails = math.exp(min(_log_tail_moment(trial, order, direction, log_scale), 700.0))
    lowest = min(math.exp(trial.log_acceptance[0]), math.exp(float(log_accepted.min())))
    return worst + (max(rest, 0.0) + tails) / lowest


@lru_cache(maxsize=4096)
def acceptance_change(trial: Trial) -> tuple[float, float]:
    """Smallest and largest ratio of the acceptance probabilities with and without the record.

    The ratios are rounded outward. The equations are in docs/guarantees/selective.md, step 5.
    """
    lowest, highest = map(math.exp, trial.log_acceptance)
    rate, stay = trial.test.rate, 1 - trial.test.rate
    extreme = highest / lowest
    if rate == 1:
        return 1 / extreme, extreme

    def spread(ratio: float) -> float:
        return stay * (highest - lowest) * hockey_stick(trial.train, ratio / stay)

    _, high = bisect(
        lambda c: rate * highest + spread(c) > lowest * (c - stay), 1.0, extreme, rounds=_MAX_ITERATIONS
    )
    _, low = bisect(
        lambda c: rate * lowest - spread(c) < highest * (c - stay),
        1.0,
        1 / extreme,
        rounds=_MAX_ITERATIONS,
    )
    return low * (1 - 1e-12), high * OUTWARD
