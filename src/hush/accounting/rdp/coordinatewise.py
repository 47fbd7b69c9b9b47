"""RDP of one step with independent noise per coordinate, and sampling of coordinates and records.

The divergence for a change is a sum over its coordinates. `worst_allocation` bounds this sum for every
change.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import OUTWARD, Array, log1mexp, log_binomial, log_weights
from hush.accounting.rdp.profile import CoordinateRDP
from hush.core.errors import InvalidValue
from hush.core.parts import SensitivitySet

Blocks = Sequence[tuple[CoordinateRDP, SensitivitySet]]

# All integer orders up to _DENSE are computed, because the binomial sum of subsampling magnifies errors.
# Higher orders have a fixed spacing of 3%, so cached values can be reused.
_DENSE = 152
_COMPUTED_ORDERS: Array = np.unique(
    np.round(np.append(np.arange(2, _DENSE + 1), np.geomspace(_DENSE, 1e6, 298)))
)
# Twice as many orders would change epsilon by less than 0.1%.
WHOLE_ORDERS: Array = np.unique(np.round(np.append(np.arange(2, 33), np.geomspace(33, 1024, 28))))


def coordinatewise_rdp(blocks: Blocks, rate: float, orders: npt.ArrayLike) -> Array:
    """Rényi divergence of one step at each order, the larger of both directions.

    **Guarantee.** An upper bound for adding and for removing one record:
    docs/guarantees/coordinate-wise.md.
    """
    order_array = np.atleast_1d(np.asarray(orders, dtype=float))
    if rate == 1:
        return _sum_over_blocks(blocks, order_array)
    if not ((order_array == np.round(order_array)) & (order_array >= 2)).all():
        raise InvalidValue(
            f"orders={orders!r} must be whole numbers >= 2 under sampling: the amplification bound is "
            "a binomial sum. Pass e.g. orders=[2, 3, 4]."
        )
    base = _at_every_order(tuple(blocks), int(order_array.max()))
    swapped = all(profile.rate == 1 for profile, _ in blocks)
    return np.array([subsampled_rdp(base[: int(a) - 1], rate, swapped=swapped) for a in order_array])


def subsampled_rdp(base: npt.ArrayLike, rate: float, *, swapped: bool) -> float:
    """Rényi divergence of one Poisson-subsampled step at an integer order a.

    Args:
        base: Divergences without sampling at orders 2 to a.
        rate: Sampling rate.
        swapped: Whether a reflection swaps the distributions with and without the record, as for
            symmetric noise. Otherwise the odd moments of the ratio minus 1 must be non-negative, as with
            sampled coordinates.

    **Guarantee.** An upper bound for both directions, if `base` bounds both directions (the worst case
    may depend on the order): docs/guarantees/coordinate-wise.md, "Input sampling".
    """
    unsampled = np.asarray(base, dtype=float)
    a = len(unsampled) + 1
    v = np.arange(2, a + 1)
    log_weight = log_binomial(a, v.astype(float), log_weights(rate))
    power = (v - 1) * unsampled
    # the binomial weights sum to 1, so subtract 1 from every term to avoid cancellation
    terms = log_weight + power + log1mexp(-power)
    if not swapped and a % 2:
        terms = np.append(terms, log_weight[-1] + power[-1] + math.log1p(-rate))
    excess = np.logaddexp.reduce(terms)
    return float(np.logaddexp(0.0, excess) / (a - 1) * OUTWARD)


def _at_every_order(blocks: tuple[tuple[CoordinateRDP, SensitivitySet], ...], highest: int) -> Array:
    """Bounds at the orders 2, 3, ..., `highest`, computed at knots and interpolated.

    (a - 1) D_a is convex in a for each change, and therefore for the worst change, so chords are upper
    bounds.
    """
    every = np.arange(2, highest + 1, dtype=float)
    knots = np.append(
        _COMPUTED_ORDERS[: int(np.searchsorted(_COMPUTED_ORDERS, highest))], float(highest)
    )
    cache = _moment_cache(blocks)
    missing = np.array([a for a in knots if a not in cache])
    if len(missing):
        computed = (missing - 1) * _sum_over_blocks(blocks, missing)
        cache.update(zip(missing.tolist(), computed.tolist(), strict=True))
    moments = np.array([cache[a] for a in knots])
    finite = np.isfinite(moments)
    # Divergences increase with the order, so all orders above the first infinite one are infinite.
    limit = float(knots[finite].max(initial=1.0))
    divergences = np.full(len(every), np.inf)
    finite_orders = every <= limit
    if finite_orders.any():
        orders = every[finite_orders]
        divergences[finite_orders] = np.interp(orders, knots[finite], moments[finite]) / (orders - 1)
    return divergences


@lru_cache(maxsize=16)
def _moment_cache(blocks: tuple[tuple[CoordinateRDP, SensitivitySet], ...]) -> dict[float, float]:
    """Cache of (a - 1) D_a by order a, for the given blocks without subsampling of records."""
    return {}


def _sum_over_blocks(blocks: Blocks, orders: Array) -> Array:
    """Bound on the divergence of a product of blocks: the sum of the worst cases of the blocks."""
    return np.asarray(np.sum([worst_allocation(*block, orders) for block in blocks], axis=0))


_FIRST_RATIO = 1.6
_TOLERANCE = 2e-4
_MAX_REFINEMENTS = 30


@dataclass(eq=False)
class ConcaveMajorant:
    """Certified bounds on the least concave majorant of y -> h(y^(1/p)) at `point`, for one order.

    For `point` = 0, the value is the slope at 0, as needed for an unlimited number of coordinates.
    """

    p: float
    point: float
    shifts: Array
    first_height: float
    """Upper bound on the divergence up to the first grid point."""
    order: float
    min_curvature: float
    """Lower bound on the second derivative of exp((order - 1) h)."""
    grid: Array = field(default_factory=lambda: np.zeros(0))
    costs: Array = field(default_factory=lambda: np.zeros(0))

    @classmethod
    def start(
        cls, profile: CoordinateRDP, p: float, top: float, point: float, order: float
    ) -> "ConcaveMajorant":
        """Create a coarse grid between the quadratic range and `top`."""
        uniform = point ** (1 / p)
        low = top if profile.quadratic and p <= 2 else min(top, profile.nearly_quadratic(order))
        if p > 2 and point > 0:
            low = min(low, 0.005 * uniform)
        steps = max(1, math.ceil(math.log(top / low) / math.log(_FIRST_RATIO)))
        grid = np.geomspace(low, top, steps + 1) if low < top else np.array([top])
        grid[-1] = top
        if low < uniform < top:
            grid = np.unique(np.append(grid, uniform))
        rise = profile.curvature(np.array([order]), np.array([low]))[0] * low**2
        # a parabola in s is concave in y = s^p for p >= 2
        min_curvature = profile.min_moment_curvature(order, top) if p >= 2 else 0.0
        return cls(p, point, grid, float(rise), order, min_curvature)

    def add_points(self, shifts: Array, costs: Array) -> None:
        """Add grid shifts and their divergences."""
        shifts_so_far = np.concatenate([self.grid, shifts])
        ranking = np.argsort(shifts_so_far)
        self.grid, self.costs = shifts_so_far[ranking], np.concatenate([self.costs, costs])[ranking]

    def upper(self) -> float:
        """Upper bound on the majorant."""
        x, value = self._tangent_crossings()
        # for p <= 2 the quadratic bound is convex in y, so the chord from 0 is an upper bound
        origin = 0.0 if self.p <= 2 else self.first_height
        raised = self.costs.copy()
        raised[0] = max(raised[0], self.first_height)
        points = np.concatenate([[0.0], self._powers(), x])
        return self._hull(points, np.concatenate([[origin], raised, value]))[0]

    def refinement_points(self, tolerance: float) -> Array:
        """Shifts to add to the grid; empty if the relative gap of the bounds is at most `tolerance`."""
        points, heights = np.concatenate([[0.0], self._powers()]), np.concatenate([[0.0], self.costs])
        level, left, right = self._hull(points, heights)
        if not np.isfinite(self.costs).all():
            return np.zeros(0)
        x, value = self._tangent_crossings()
        above, below = points > self.point, points < self.point
        if self.point == 0:
            line = level * x * (1 + tolerance)
        else:
            if right > left:
                at_left = heights[np.searchsorted(points, left)]
                slope = (heights[np.searchsorted(points, right)] - at_left) / (right - left)
            elif above.any():  # a supporting line through (point, level)
                slope = ((heights[above] - level) / (points[above] - self.point)).max()
            else:
                slope = ((level - heights[below]) / (self.point - points[below])).min()
            line = level * (1 + tolerance) + slope * (x - self.point)
        wide = value > line
        return np.asarray(np.sqrt(self.grid[:-1][wide] * self.grid[1:][wide]))

    def _powers(self) -> Array:
        y = self.grid**self.p
        # the grid contains the shift of `point`; its power must equal `point` exactly
        return np.where(np.abs(y - self.point) <= 1e-12 * self.point, self.point, y)

    def _tangent_crossings(self) -> tuple[Array, Array]:
        """Intersection of the tangents to the bound of each cell: position and height.

        The bound of a cell is the minimum of the chord of h, and the chord of exp((a - 1) h) corrected
        by its minimum curvature.
        """
        low, high = self.grid[:-1], self.grid[1:]
        below, above = self.costs[:-1], np.maximum(self.costs[1:], self.costs[:-1])
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            rise = (above - below) / (high - low)
            x, value, over = self._crossing(below, above, rise, rise)
            if self.min_curvature > 0:
                power = self.order - 1
                start, end = np.expm1(power * below), np.expm1(power * above)
                slope = (end - start) / (high - low)
                # limited to keep the bound concave in y
                most = slope * (high - low) / (high + low)
                half = np.minimum(self.min_curvature * (high - low) / 2, most)
                first, last = (slope - half) / power / (1 + start), (slope + half) / power / (1 + end)
                other_x, other_value, other_over = self._crossing(below, above, first, last)
                lower = other_over < over
                x, value = np.where(lower, other_x, x), np.where(lower, other_value, value)
        return x, np.where(np.isnan(value), np.inf, value)

    def _crossing(
        self, below: Array, above: Array, rise: Array, last: Array
    ) -> tuple[Array, Array, Array]:
        """Position and height of the intersection of tangents, and height above the chord."""
        steep = rise / self.p * self.grid[:-1] ** (1 - self.p)
        flat = last / self.p * self.grid[1:] ** (1 - self.p)
        y_low, y_high = self._powers()[:-1], self._powers()[1:]
        cross = (above - flat * y_high - below + steep * y_low) / (steep - flat)
        middle = (y_low + y_high) / 2
        # every position in the cell is valid, because both tangents are below the vertex
        x = np.where(np.isfinite(cross), np.clip(cross, y_low, y_high), middle)
        value = np.maximum(below + steep * (x - y_low), above - flat * (y_high - x))
        return x, value, value - below - (above - below) / (y_high - y_low) * (x - y_low)

    def _hull(self, points: Array, heights: Array) -> tuple[float, float, float]:
        """Concave majorant at `point` (for 0: its slope at 0), and the points that define it."""
        if self.point == 0:
            if heights[points == 0].max(initial=0.0) > 0:
                return math.inf, 0.0, 0.0
            positive = points > 0
            slope = heights[positive] / points[positive]
            best = int(np.argmax(slope))
            return float(slope[best]), 0.0, float(points[positive][best])
        if np.isinf(heights).any():
            return math.inf, self.point, self.point
        left, right = points <= self.point, points > self.point
        x, y = points[left], heights[left]
        at_left = x == self.point
        level, span = float(y[at_left].max(initial=-math.inf)), (self.point, self.point)
        if right.any():
            share = (self.point - x[:, None]) / (points[right] - x[:, None])
            mixed = (1 - share) * y[:, None] + share * heights[right]
            i, j = np.unravel_index(int(np.argmax(mixed)), mixed.shape)
            if mixed[i, j] > level * OUTWARD:
                level, span = float(mixed[i, j]), (float(x[i]), float(points[right][j]))
        return level, span[0], span[1]


def worst_allocation(profile: CoordinateRDP, ball: SensitivitySet, orders: npt.ArrayLike) -> Array:
    """Upper bound on the sum of `profile` over the coordinates of every change in `ball`, by order.

    **Guarantee.** At least the supremum, and within 0.1% of the value of the allocation lemma in
    docs/guarantees/coordinate-wise.md.
    """
    order = np.atleast_1d(np.asarray(orders, dtype=float))
    if profile.rate < 1 and not (order == np.round(order)).all():
        raise InvalidValue(
            f"orders={orders!r} must be whole numbers under coordinate sampling: the proof of "
            "convexity in the shift needs whole orders. Pass e.g. orders=[2, 3, 4]."
        )
    if ball.max_entry == 0:
        return np.zeros(len(order))
    dimension = math.inf if ball.dimension is None else float(ball.dimension)
    if ball.p == math.inf or dimension * ball.max_entry**ball.p <= ball.norm**ball.p:
        # all coordinates may change by `max_entry`
        return np.asarray(dimension * profile(order, ball.max_entry))
    if ball.p == 2 and profile.beta == 2:
        # the divergence is convex in the squared shift, so its majorant is the chord up to the cap
        return np.asarray(ball.max_entries_moved * profile(order, ball.max_entry) * OUTWARD)
    # |s|^p of each coordinate, if all coordinates change equally
    uniform = 0.0 if ball.dimension is None else ball.norm**ball.p / ball.dimension
    majorants = [ConcaveMajorant.start(profile, ball.p, ball.max_entry, uniform, a) for a in order]
    open_orders = list(range(len(order)))
    points = [majorant.shifts for majorant in majorants]
    for _ in range(_MAX_REFINEMENTS):
        lengths, shifts = zip(*((len(points[k]), points[k]) for k in open_orders), strict=True)
        costs = profile(np.repeat(order[open_orders], lengths), np.concatenate(shifts))
        for k, cost in zip(open_orders, np.split(costs, np.cumsum(lengths)[:-1]), strict=True):
            majorants[k].add_points(points[k], cost)
            points[k] = majorants[k].refinement_points(_TOLERANCE)
        open_orders = [k for k in open_orders if len(points[k])]
        if not open_orders:
            break
    scale = ball.norm**ball.p if ball.dimension is None else float(ball.dimension)
    return np.array([scale * majorant.upper() for majorant in majorants]) * OUTWARD
