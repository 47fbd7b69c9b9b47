"""The worst way to spread one record's change over the coordinates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.rdp.concave_majorant import ConcaveMajorant
from hush.accounting.rdp.profile import CoordinateRDP, checked
from hush.core.errors import InvalidValue
from hush.core.sensitivity import SensitivitySet

_TOLERANCE = 2e-4
_ROUNDS = 30


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A bound at each order, and a concrete change that comes close to it.

    `counts[k]` coordinates move by `shifts[k]`, k = 0, 1, 2; that change costs `attained`.
    """

    bound: Array
    attained: Array
    counts: Array
    shifts: Array


def worst_allocation(profile: CoordinateRDP, ball: SensitivitySet, orders: npt.ArrayLike) -> Allocation:
    """The largest sum of `profile` over the coordinates of a change in `ball`, at each order.

    **Guarantee.** `bound` is never below the supremum: the allocation lemma, proved in
    docs/guarantees/coordinate-wise.md. It is within 1e-3 of the lemma's value.

    >>> from hush.accounting.rdp.profile import Law
    >>> gaussian = Profile(law=Law(beta=2, scale=1))
    >>> worst(gaussian, Ball(p=2, norm=0.5, dimension=1000), [2, 3]).bound.round(6).tolist()
    [0.5, 0.75]
    """
    order = checked(np.atleast_1d(np.asarray(orders, dtype=float)), 0.0)[0]
    if not profile.convex(order):
        raise InvalidValue(
            f"orders={orders!r} must be whole numbers under coordinate sampling: only there is the "
            "cost of a coordinate proved convex in its shift. Pass e.g. orders=[2, 3, 4]."
        )
    if ball.max_entry == 0:
        nothing = np.zeros((3, len(order)))
        return Allocation(bound=nothing[0], attained=nothing[0], counts=nothing, shifts=nothing)
    if ball.p == math.inf or _all_at_top(ball):
        return _every_coordinate_at_top(profile, ball, order)
    if ball.p == 2 and profile.law.beta == 2:
        return _as_few_as_can(profile, ball, order)
    return _on_majorant(profile, ball, order)


def sum_over_blocks(
    blocks: Sequence[tuple[CoordinateRDP, SensitivitySet]], orders: npt.ArrayLike
) -> Array:
    """The bound for a change that is in every block's ball at once: the blocks' bounds, added."""
    if not blocks:
        raise InvalidValue("blocks=[] must not be empty: pass e.g. blocks=[(profile, ball)].")
    total: Array = np.sum(
        [worst_allocation(profile, ball, orders).bound for profile, ball in blocks], axis=0
    )
    return total


def _all_at_top(ball: SensitivitySet) -> bool:
    return ball.dimension is not None and ball.dimension * ball.max_entry**ball.p <= ball.norm**ball.p


def _every_coordinate_at_top(profile: CoordinateRDP, ball: SensitivitySet, order: Array) -> Allocation:
    many = math.inf if ball.dimension is None else float(ball.dimension)
    bound = many * profile(order, ball.max_entry)
    counts, shifts = np.zeros((3, len(order))), np.zeros((3, len(order)))
    counts[0], shifts[0] = many, ball.max_entry
    return Allocation(bound=bound, attained=bound, counts=counts, shifts=shifts)


def _as_few_as_can(profile: CoordinateRDP, ball: SensitivitySet, order: Array) -> Allocation:
    """Normal noise under a Euclidean bound: the cost is convex in the square of the shift.

    It is the logarithm of a sum of exponentials of that square (of one, without sampling). So the
    majorant is the chord from 0 to the top, which as few coordinates as can be attain.
    """
    counts, shifts = np.zeros((3, len(order))), np.zeros((3, len(order)))
    counts.T[:], shifts.T[:] = _concrete(ball, 0.0, ball.max_entry)
    bound = ball.max_entries_moved * profile(order, ball.max_entry) * OUTWARD
    attained = _cost(profile, order, counts, shifts)
    return Allocation(bound=bound, attained=np.minimum(attained, bound), counts=counts, shifts=shifts)


def _on_majorant(profile: CoordinateRDP, ball: SensitivitySet, order: Array) -> Allocation:
    """Refine a grid of shifts until the majorant's bounds from both sides are close, at every order."""
    grids = [ConcaveMajorant.start(profile, ball.p, ball.max_entry, _spread(ball), a) for a in order]
    asked = list(range(len(order)))
    points = [grid.shifts for grid in grids]
    for _ in range(_ROUNDS):
        lengths = [len(points[k]) for k in asked]
        costs = profile(np.repeat(order[asked], lengths), np.concatenate([points[k] for k in asked]))
        for k, cost in zip(asked, np.split(costs, np.cumsum(lengths)[:-1]), strict=True):
            grids[k].learn(points[k], cost)
            points[k] = grids[k].wanted(_TOLERANCE)
        asked = [k for k in asked if len(points[k])]
        if not asked:
            break
    budget = ball.norm**ball.p
    scale = budget if ball.dimension is None else float(ball.dimension)
    bound = np.array([scale * grid.upper() for grid in grids]) * OUTWARD
    counts, shifts = np.zeros((3, len(order))), np.zeros((3, len(order)))
    for k, grid in enumerate(grids):
        counts[:, k], shifts[:, k] = _concrete(ball, *grid.touching())
    attained = _cost(profile, order, counts, shifts)
    return Allocation(bound=bound, attained=np.minimum(attained, bound), counts=counts, shifts=shifts)


def _cost(profile: CoordinateRDP, order: Array, counts: Array, shifts: Array) -> Array:
    """What so many coordinates at these shifts cost; none cost nothing, however far they would move."""
    each = profile(np.broadcast_to(order, shifts.shape), shifts)
    found: Array = np.multiply(counts, each, out=np.zeros_like(each), where=counts > 0).sum(axis=0)
    return found


def _spread(ball: SensitivitySet) -> float:
    """|s|^p of one coordinate when all move alike; 0 without a dimension."""
    return 0.0 if ball.dimension is None else ball.norm**ball.p / ball.dimension


def _concrete(ball: SensitivitySet, low: float, high: float) -> tuple[list[float], list[float]]:
    """Whole numbers of coordinates at two shifts, and what is left of the budget on one more."""
    budget, p = ball.norm**ball.p, ball.p
    room = math.inf if ball.dimension is None else float(ball.dimension)
    if high == low or math.isinf(room):
        many = math.floor(min(room, budget / high**p * OUTWARD))
        few = 0
    else:
        many = math.floor(max(0.0, (budget - room * low**p) / (high**p - low**p)) * OUTWARD)
        few = max(0, int(room) - many - 1) if low > 0 else 0
    left = max(0.0, budget - many * high**p - few * low**p) ** (1 / p)
    last = 1 if many + few < room and left > 0 else 0
    return [many, few, last], [high, low, min(left, ball.max_entry) if last else 0.0]
