"""Minimisation of the total variance under a divergence that is convex in log-variances at each order.

To keep a budget one order is enough, so the admissible noise is a union of convex sets, one an
order: the optimum is the best of the optima at single orders. An order is solved only if the tangent
to its cost at the best point so far does not already rule it out.
docs/guarantees/shaped-noise.md, "The search".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import logsumexp

from hush.accounting.numerics import Array, log_binomial_in_turn, log_expm1, log_sum_exp, log_weights
from hush.accounting.rdp.coordinatewise import AdjacentPair, removal_surcharge
from hush.core.parts import SensitivitySet


class BlockCost:
    """D_a of one step and its gradient in the blocks' log-variances, convex at each whole order."""

    def __init__(
        self,
        blocks: Sequence[SensitivitySet],
        rate: float,
        coordinate_rate: float,
        highest: int,
        pair: AdjacentPair,
    ) -> None:
        self._squares = np.array([block.max_entry**2 for block in blocks])
        self._moved = np.array([block.max_entries_moved for block in blocks])
        self._rate, self._pair = rate, pair
        v = np.arange(2, highest + 1)
        self._pairs: Array = v * (v - 1) / 2
        self._inner = _log_binomial(highest, coordinate_rate)
        self._outer = _log_binomial(highest, rate) if rate < 1 else None

    def at(self, order: int, log_variances: Array) -> tuple[float, Array]:
        """The divergence at one order, and its gradient."""
        moments, slopes = self._unsampled(order, log_variances)
        return self._sampled(order, moments, slopes)

    def at_all(self, orders: Sequence[int], log_variances: Array) -> list[tuple[float, Array]]:
        """`at` several orders, at little more than the cost of the highest alone."""
        moments, slopes = self._unsampled(max(orders), log_variances)
        return [self._sampled(a, moments[: a - 1], slopes[:, : a - 1]) for a in orders]

    def _unsampled(self, order: int, log_variances: Array) -> tuple[Array, Array]:
        """(v - 1) D_v for v = 2, ..., order without subsampling of records, and gradients by block.

        Theorem 5.2 of the twice-sampling paper, block by block.
        """
        weight = self._inner[: order - 1, : order - 1]
        pairs = self._pairs[: order - 1]
        total, slopes = np.zeros(order - 1), np.empty((len(self._squares), order - 1))
        for j, (square, entries_moved) in enumerate(zip(self._squares, self._moved, strict=True)):
            power = pairs * square * math.exp(-log_variances[j])
            # the binomial weights sum to one, so 1 is taken from every term
            excess = log_sum_exp(weight + log_expm1(power))
            moment = np.logaddexp(0.0, excess)
            total += entries_moved * moment
            slopes[j] = -entries_moved * (np.exp(weight + power - moment[:, None]) @ power)
        return total, slopes

    def _sampled(self, order: int, moments: Array, slopes: Array) -> tuple[float, Array]:
        """Theorem 5.4, and the surcharge for the removal of a record at odd orders."""
        if self._outer is None:
            return float(moments[-1]) / (order - 1), slopes[:, -1] / (order - 1)
        weight = self._outer[order - 2, : order - 1]
        surcharge = removal_surcharge(np.arange(2, order + 1), order, self._pair) * (1 - self._rate)
        with np.errstate(divide="ignore"):
            terms = weight + moments + np.log(-np.expm1(-moments) + surcharge)
        moment = float(np.logaddexp(0.0, log_sum_exp(terms)))
        parts = np.exp(weight + moments - moment) * (1 + surcharge)
        return moment / (order - 1), slopes @ parts / (order - 1)


def _log_binomial(highest: int, rate: float) -> Array:
    """Log-probabilities that v of a take part, rows a = 2, ..., highest, columns v = 2, ..., highest."""
    a = np.arange(2, highest + 1, dtype=float)[:, None]
    v = np.arange(2, highest + 1, dtype=float)[None, :]
    possible: npt.NDArray[np.bool_] = v <= a
    return np.where(possible, log_binomial_in_turn(a, np.minimum(v, a), log_weights(rate)), -np.inf)


# An order whose tangent allows a smaller gain than this is not solved, relatively.
_MIN_GAIN = 1e-9
# How close to its limit a divergence is brought, relatively.
_LIMIT_TOLERANCE = 1e-13
_NEWTON_STEPS = 200


@dataclass(frozen=True, kw_only=True)
class Optimum:
    """The optimal log-variances of the blocks."""

    log_variances: Array
    log_total: float
    order: int
    residual: float
    """The largest difference between a block's shares of the variance and of the divergence's slope."""


def least_variance(cost: BlockCost, ranks: Array, limits: Mapping[int, float], start: Array) -> Optimum:
    """The least sum of rank * variance with cost(a) <= limits[a] at one order a at least."""
    orders = sorted(limits)
    lower_bounds = dict.fromkeys(orders, -math.inf)
    solved = set[int]()
    best, order = start, min(orders, key=lambda a: abs(math.log(a / 8)))
    best_order, best_total = order, math.inf
    while True:
        candidate = _solve_order(cost, ranks, order, limits[order], best)
        solved.add(order)
        total = _log_total(ranks, candidate)
        if total < best_total:
            best, best_order, best_total = candidate, order, total
        for a, (value, slopes) in zip(orders, cost.at_all(orders, best), strict=True):
            bound = _tangent_bound(ranks, best, value - limits[a], slopes)
            lower_bounds[a] = max(lower_bounds[a], bound)
        open_orders = [a for a in orders if a not in solved and lower_bounds[a] < best_total - _MIN_GAIN]
        if not open_orders:
            break
        order = min(open_orders, key=lower_bounds.__getitem__)
    share = _log_shares(ranks, best)
    slopes = cost.at(best_order, best)[1]
    return Optimum(
        log_variances=best,
        log_total=best_total,
        order=best_order,
        residual=float(np.abs(np.exp(share) - slopes / slopes.sum()).max()),
    )


def _solve_order(cost: BlockCost, ranks: Array, order: int, limit: float, start: Array) -> Array:
    """The optimum at one order, searched among shapes, each scaled to the limit."""
    if len(start) == 1:
        return scale_to_limit(cost, order, limit, start)
    scaled = start

    def objective(shape: Array) -> tuple[float, Array]:
        nonlocal scaled
        scaled = scale_to_limit(cost, order, limit, shape + np.mean(scaled - shape))
        slopes = cost.at(order, scaled)[1]
        # the scale follows the shape such that the cost stays: d scale = - slopes / sum of slopes
        return _log_total(ranks, scaled), np.exp(_log_shares(ranks, scaled)) - slopes / slopes.sum()

    # The search may end early at the rounding limit; `residual` is the remaining distance.
    solution = minimize(objective, start, jac=True, method="BFGS", options={"gtol": 1e-11})
    objective(solution.x)
    return scaled


def scale_to_limit(cost: BlockCost, order: int, limit: float, log_variances: Array) -> Array:
    """The log-variances, all moved by one number such that the divergence is `limit`.

    Newton's iteration in the precision: there the cost is convex, so that after its first step it
    comes from the side above the limit and never passes it.
    """
    for _ in range(_NEWTON_STEPS):
        value, slopes = cost.at(order, log_variances)
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


def _log_total(ranks: Array, log_variances: Array) -> float:
    return float(logsumexp(np.log(ranks) + log_variances))


def _log_shares(ranks: Array, log_variances: Array) -> Array:
    log_shares: Array = np.log(ranks) + log_variances - _log_total(ranks, log_variances)
    return log_shares
