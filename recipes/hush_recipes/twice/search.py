"""Block-wise Gaussian noise of least total variance for sampled coordinates, by a search.

docs/guarantees/shaped-noise.md. The proportions of `hush.fit_noise`, which are the optimum if every
coordinate takes part, need at most 0.003% more variance in the setting of Table 2.

The search is not trusted: the accountants charge the noise like any other. The optimum is the best of
the optima at single orders, each a convex problem. An order is solved only if the tangent to its cost at
the best point so far does not rule it out.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize
from scipy.special import logsumexp

from hush.accounting.calibrate import calibrate, closed_form_deviations
from hush.accounting.numerics import (
    OUTWARD,
    Array,
    log_binomial_in_turn,
    log_expm1,
    log_sum_exp,
    log_weights,
)
from hush.accounting.rdp.conversion import conversion_term
from hush.accounting.rdp.coordinatewise import WHOLE_ORDERS
from hush.accounting.steps import CoordinateWise
from hush.clipping import L2
from hush.core.errors import BudgetExceeded
from hush.core.guarantee import Budget
from hush.core.parts import SensitivitySet
from hush.core.plan import Plan
from hush.noise import Gaussian
from hush.sampling import FullBatch, Poisson

Blocks = Sequence[SensitivitySet]
"""The changes that one record can make in each block of coordinates."""

_MAX_CORRECTIONS, _NEWTON_STEPS = 20, 200
# Relative gain that a tangent must allow for its order to be solved.
_MIN_GAIN = 1e-9
# Distance of a divergence from its limit at which scaling ends, relatively.
_LIMIT_TOLERANCE = 1e-13


def least_variance_deviations(
    blocks: Blocks, *, rate: float, coordinate_rate: float = 1.0, budget: Budget, steps: int
) -> Array:
    """Deviation of each block's Gaussian noise, of least total variance within `budget`.

    **Guarantee.** The noise keeps the budget: at coordinate rate 1 by privacy loss distributions, below
    by Rényi divergences at whole orders.
    """
    closed_form = closed_form_deviations(blocks)
    if coordinate_rate == 1:
        plain = Plan(
            sampling=FullBatch() if rate == 1 else Poisson(rate=rate),
            clipping=L2(norm=1.0),
            noise=Gaussian(multiplier=1.0),
        )
        noise = calibrate(plain, budget, steps).noise
        return np.asarray(float(noise.to_plain()["multiplier"]) * OUTWARD * closed_form)
    limits = divergence_limits(budget, steps)
    cost = BlockCost(blocks, rate, coordinate_rate, max(limits))
    ranks = np.array([block.size for block in blocks], dtype=float)
    best, _, order = least_variance(cost, ranks, limits, 2 * np.log(closed_form))
    return np.asarray(np.exp(certified(blocks, best, rate, coordinate_rate, order, limits[order]) / 2))


def divergence_limits(budget: Budget, steps: int) -> dict[int, float]:
    """Largest Rényi divergence of a step within the budget, at each whole order that has one."""
    limits = (budget.epsilon - conversion_term(WHOLE_ORDERS, budget.delta)) / steps
    positive = {int(a): float(limit) for a, limit in zip(WHOLE_ORDERS, limits, strict=True) if limit > 0}
    if not positive:
        raise BudgetExceeded(
            f"epsilon={budget.epsilon:g} at delta={budget.delta:g} is less than Rényi divergences give "
            f"at any order up to {WHOLE_ORDERS[-1]:g}, with any noise. Allow a larger budget, or use "
            "all coordinates (coordinate_rate=1), which is charged more tightly."
        )
    return positive


def certified(
    blocks: Blocks, log_variances: Array, rate: float, coordinate_rate: float, order: int, limit: float
) -> Array:
    """The log-variances, raised until the accountant's divergence is within the limit."""
    for _ in range(_MAX_CORRECTIONS):
        noisy = tuple(zip(blocks, np.exp(log_variances / 2), strict=True))
        step = CoordinateWise.normal(rate, noisy, coordinate_rate)
        divergence = float(step.rdp(np.array([order]))[0])
        if divergence <= limit:
            return log_variances
        # k times the variance costs less than 1/k of the divergence, which is convex in the precision
        log_variances = log_variances + math.log(divergence / limit * OUTWARD)
    raise AssertionError("more noise costs less")


class BlockCost:
    """D_a of one step and its gradient in the blocks' log-variances, convex at each whole order.

    `both_directions`: whether `ADD` is covered at odd orders too, by a term that the paper omits.
    """

    def __init__(
        self,
        blocks: Blocks,
        rate: float,
        coordinate_rate: float,
        highest: int,
        *,
        both_directions: bool = True,
    ) -> None:
        self._squares = np.array([block.max_entry**2 for block in blocks])
        self._moved = np.array([block.max_entries_moved for block in blocks])
        self._rate, self._both_directions = rate, both_directions
        v = np.arange(2, highest + 1)
        self._pairs: Array = v * (v - 1) / 2
        self._inner = _log_binomial(highest, coordinate_rate)
        self._outer = _log_binomial(highest, rate) if rate < 1 else None

    def at(self, order: int, log_variances: Array) -> tuple[float, Array]:
        """The divergence at one order, and its gradient."""
        return self.at_all([order], log_variances)[0]

    def at_all(self, orders: Sequence[int], log_variances: Array) -> list[tuple[float, Array]]:
        """`at` several orders, at little more than the cost of the highest alone.

        Theorem 5.2 of the twice-sampling paper block by block, then 5.4.
        """
        # (v - 1) D_v for v = 2, 3, ... without subsampling of records, and gradients by block
        size = max(orders) - 1
        weight, pairs = self._inner[:size, :size], self._pairs[:size]
        moments, slopes = np.zeros(size), np.empty((len(self._squares), size))
        for j, (square, entries_moved) in enumerate(zip(self._squares, self._moved, strict=True)):
            power = pairs * square * math.exp(-log_variances[j])
            # the binomial weights sum to one, so 1 is taken from every term
            excess = log_sum_exp(weight + log_expm1(power))
            moment = np.logaddexp(0.0, excess)
            moments += entries_moved * moment
            slopes[j] = -entries_moved * (np.exp(weight + power - moment[:, None]) @ power)
        return [self._sampled(a, moments[: a - 1], slopes[:, : a - 1]) for a in orders]

    def _sampled(self, order: int, moments: Array, slopes: Array) -> tuple[float, Array]:
        if self._outer is None:
            return float(moments[-1]) / (order - 1), slopes[:, -1] / (order - 1)
        weight, surcharge = self._outer[order - 2, : order - 1], np.zeros(order - 1)
        if self._both_directions and order % 2:
            surcharge[-1] = 1 - self._rate  # for the direction `ADD` at odd orders
        with np.errstate(divide="ignore"):
            terms = weight + moments + np.log(-np.expm1(-moments) + surcharge)
        moment = float(np.logaddexp(0.0, log_sum_exp(terms)))
        parts = np.exp(weight + moments - moment) * (1 + surcharge)
        return moment / (order - 1), slopes @ parts / (order - 1)


def _log_binomial(highest: int, rate: float) -> Array:
    """Log-probabilities that v of a take part, rows a = 2, ..., highest, columns v = 2, ..., highest."""
    a = np.arange(2, highest + 1, dtype=float)[:, None]
    v = np.arange(2, highest + 1, dtype=float)[None, :]
    return np.where(v <= a, log_binomial_in_turn(a, np.minimum(v, a), log_weights(rate)), -np.inf)


class Optimum(NamedTuple):
    """The optimal log-variances of the blocks, the log of their total, and the order that decides."""

    log_variances: Array
    log_total: float
    order: int


def least_variance(cost: BlockCost, ranks: Array, limits: Mapping[int, float], start: Array) -> Optimum:
    """The least sum of rank * variance with cost(a) <= limits[a] at one order a at least."""
    open_orders = sorted(limits)
    lower_bounds = dict.fromkeys(open_orders, -math.inf)
    order = min(open_orders, key=lambda a: abs(math.log(a / 8)))
    best = Optimum(start, math.inf, order)
    while open_orders:
        candidate = _solve_order(cost, ranks, order, limits[order], best.log_variances)
        total = float(logsumexp(np.log(ranks) + candidate))
        if total < best.log_total:
            best = Optimum(candidate, total, order)
        lower_bounds[order] = math.inf
        at_best = cost.at_all(open_orders, best.log_variances)
        for a, (value, slopes) in zip(open_orders, at_best, strict=True):
            bound = _tangent_bound(ranks, best.log_variances, value - limits[a], slopes)
            lower_bounds[a] = max(lower_bounds[a], bound)
        open_orders = [a for a in open_orders if lower_bounds[a] < best.log_total - _MIN_GAIN]
        order = min(open_orders, key=lower_bounds.__getitem__, default=order)
    return best


def _solve_order(cost: BlockCost, ranks: Array, order: int, limit: float, start: Array) -> Array:
    """The optimum at one order, searched among shapes, each scaled to the limit."""
    if len(start) == 1:
        return scale_to_limit(cost, order, limit, start)
    scaled = start

    def objective(shape: Array) -> tuple[float, Array]:
        nonlocal scaled
        scaled = scale_to_limit(cost, order, limit, shape + np.mean(scaled - shape))
        slopes = cost.at(order, scaled)[1]
        log_total = float(logsumexp(np.log(ranks) + scaled))
        shares = np.exp(np.log(ranks) + scaled - log_total)
        # the scale follows the shape such that the cost stays: d scale = - slopes / sum of slopes
        return log_total, shares - slopes / slopes.sum()

    # The search may end early at the rounding limit.
    solution = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-11})
    objective(solution.x)
    return scaled


def scale_to_limit(cost: BlockCost, order: int, limit: float, log_variances: Array) -> Array:
    """The log-variances, all moved by one number such that the divergence is `limit`.

    Newton's iteration in the precision, in which the cost is convex: it stays above the limit. Infinite
    if no noise is enough: at an odd order the bound for `ADD` is positive for any noise.
    """
    for _ in range(_NEWTON_STEPS):
        value, slopes = cost.at(order, log_variances)
        if not slopes.sum():
            return np.full_like(log_variances, math.inf)
        # the cost's slope in the common precision, in units of its present value
        step = (limit - value) / -float(slopes.sum())
        if abs(step) < _LIMIT_TOLERANCE:
            break
        # the first step may be wild; the cost at no precision is 0, so none reaches -1
        log_variances = log_variances - math.log1p(min(max(step, -0.999999), 1e6))
    return log_variances


def _tangent_bound(ranks: Array, point: Array, excess: float, slopes: Array) -> float:
    """The least log-total with excess + slopes (u - point) <= 0: a lower bound."""
    weight = -slopes
    if not (weight > 0).all() or not np.isfinite(weight).all():
        return -math.inf
    share = np.log(weight / ranks)
    return float((excess + weight @ (point - share)) / weight.sum() + math.log(weight.sum()))
