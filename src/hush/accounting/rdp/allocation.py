"""The worst-case allocation of one record's change over the coordinates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.rdp.concave_majorant import ConcaveMajorant
from hush.accounting.rdp.profile import CoordinateRDP, checked
from hush.core.errors import InvalidValue
from hush.core.parts import SensitivitySet

_TOLERANCE = 2e-4
_MAX_REFINEMENTS = 30


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """An upper bound on the Rényi divergence at each order, and a change that nearly attains it.

    `counts[k]` coordinates move by `shifts[k]`, k = 0, 1, 2; that change has divergence `attained`.
    """

    bound: Array
    attained: Array
    counts: Array
    shifts: Array


def worst_allocation(profile: CoordinateRDP, ball: SensitivitySet, orders: npt.ArrayLike) -> Allocation:
    """The largest Rényi divergence of a change in `ball` at each order.

    A change's divergence is the sum of `profile` over its coordinates.

    **Guarantee.** `bound` is never below the supremum: the allocation lemma, proved in
    docs/guarantees/coordinate-wise.md. It is within 1e-3 of the lemma's value.

    >>> from hush.accounting.rdp.profile import NoiseDensity
    >>> gaussian = CoordinateRDP(law=NoiseDensity(beta=2, scale=1))
    >>> changes = SensitivitySet(p=2, norm=0.5, dimension=1000)
    >>> worst_allocation(gaussian, changes, [2, 3]).bound.round(6).tolist()
    [0.5, 0.75]
    """
    order = checked(np.atleast_1d(np.asarray(orders, dtype=float)), 0.0)[0]
    if not profile.convex(order):
        raise InvalidValue(
            f"orders={orders!r} must be whole numbers under coordinate sampling: only there is the "
            "cost of a coordinate proved convex in its shift. Pass e.g. orders=[2, 3, 4]."
        )
    if ball.max_entry == 0:
        zeros = np.zeros((3, len(order)))
        return Allocation(bound=zeros[0], attained=zeros[0], counts=zeros, shifts=zeros)
    if ball.p == math.inf or _cube_in_ball(ball):
        return _cube_vertex(profile, ball, order)
    if ball.p == 2 and profile.law.beta == 2:
        return _sparsest_change(profile, ball, order)
    return _by_concave_majorant(profile, ball, order)


def sum_over_blocks(
    blocks: Sequence[tuple[CoordinateRDP, SensitivitySet]], orders: npt.ArrayLike
) -> Array:
    """An upper bound on the divergence of a product of blocks: their worst allocations, added."""
    if not blocks:
        raise InvalidValue("blocks=[] must not be empty: pass e.g. blocks=[(profile, ball)].")
    total: Array = np.sum(
        [worst_allocation(profile, ball, orders).bound for profile, ball in blocks], axis=0
    )
    return total


def _cube_in_ball(ball: SensitivitySet) -> bool:
    """Whether every coordinate may move by `max_entry` at once."""
    return ball.dimension is not None and ball.dimension * ball.max_entry**ball.p <= ball.norm**ball.p


def _cube_vertex(profile: CoordinateRDP, ball: SensitivitySet, order: Array) -> Allocation:
    dimension = math.inf if ball.dimension is None else float(ball.dimension)
    bound = dimension * profile(order, ball.max_entry)
    counts, shifts = np.zeros((3, len(order))), np.zeros((3, len(order)))
    counts[0], shifts[0] = dimension, ball.max_entry
    return Allocation(bound=bound, attained=bound, counts=counts, shifts=shifts)


def _sparsest_change(profile: CoordinateRDP, ball: SensitivitySet, order: Array) -> Allocation:
    """Normal noise under a Euclidean bound: the divergence is convex in the square of the shift.

    It is the logarithm of a sum of exponentials of that square (of one, without sampling). So the
    majorant is the chord from 0 to the cap, attained by as few coordinates as possible.
    """
    counts, shifts = np.zeros((3, len(order))), np.zeros((3, len(order)))
    counts.T[:], shifts.T[:] = _integer_counts(ball, 0.0, ball.max_entry)
    bound = ball.max_entries_moved * profile(order, ball.max_entry) * OUTWARD
    attained = _product_rdp(profile, order, counts, shifts)
    return Allocation(bound=bound, attained=np.minimum(attained, bound), counts=counts, shifts=shifts)


def _by_concave_majorant(profile: CoordinateRDP, ball: SensitivitySet, order: Array) -> Allocation:
    """Refine a grid of shifts until the majorant's lower and upper bounds are close, at every order."""
    # |s|^p of one coordinate of the uniform change
    uniform = 0.0 if ball.dimension is None else ball.norm**ball.p / ball.dimension
    majorants = [ConcaveMajorant.start(profile, ball.p, ball.max_entry, uniform, a) for a in order]
    open_orders = list(range(len(order)))
    points = [majorant.shifts for majorant in majorants]
    for _ in range(_MAX_REFINEMENTS):
        lengths = [len(points[k]) for k in open_orders]
        costs = profile(
            np.repeat(order[open_orders], lengths), np.concatenate([points[k] for k in open_orders])
        )
        for k, cost in zip(open_orders, np.split(costs, np.cumsum(lengths)[:-1]), strict=True):
            majorants[k].add_points(points[k], cost)
            points[k] = majorants[k].refinement_points(_TOLERANCE)
        open_orders = [k for k in open_orders if len(points[k])]
        if not open_orders:
            break
    budget = ball.norm**ball.p
    scale = budget if ball.dimension is None else float(ball.dimension)
    bound = np.array([scale * majorant.upper() for majorant in majorants]) * OUTWARD
    counts, shifts = np.zeros((3, len(order))), np.zeros((3, len(order)))
    for k, majorant in enumerate(majorants):
        counts[:, k], shifts[:, k] = _integer_counts(ball, *majorant.contact_shifts())
    attained = _product_rdp(profile, order, counts, shifts)
    return Allocation(bound=bound, attained=np.minimum(attained, bound), counts=counts, shifts=shifts)


def _product_rdp(profile: CoordinateRDP, order: Array, counts: Array, shifts: Array) -> Array:
    """The divergence of `counts` coordinates at these shifts; a count of 0 adds 0 at any shift."""
    per_coordinate = profile(np.broadcast_to(order, shifts.shape), shifts)
    total: Array = np.multiply(
        counts, per_coordinate, out=np.zeros_like(per_coordinate), where=counts > 0
    ).sum(axis=0)
    return total


def _integer_counts(ball: SensitivitySet, low: float, high: float) -> tuple[list[float], list[float]]:
    """Whole numbers of coordinates at two shifts, and one more for the rest of the budget."""
    budget, p = ball.norm**ball.p, ball.p
    dimension_limit = math.inf if ball.dimension is None else float(ball.dimension)
    if high == low or math.isinf(dimension_limit):
        count_high = math.floor(min(dimension_limit, budget / high**p * OUTWARD))
        count_low = 0
    else:
        count_high = math.floor(
            max(0.0, (budget - dimension_limit * low**p) / (high**p - low**p)) * OUTWARD
        )
        count_low = max(0, int(dimension_limit) - count_high - 1) if low > 0 else 0
    rest = max(0.0, budget - count_high * high**p - count_low * low**p) ** (1 / p)
    count_last = 1 if count_high + count_low < dimension_limit and rest > 0 else 0
    last = min(rest, ball.max_entry) if count_last else 0.0
    return [count_high, count_low, count_last], [high, low, last]
