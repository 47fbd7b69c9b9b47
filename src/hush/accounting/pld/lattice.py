"""The privacy loss of one step on a grid: once too large (`above`), once too small (`below`).

Only the first law's mass is stored; the second law has exp(-loss) times as much at every point.
Both are proved in docs/guarantees/poisson-gaussian.md.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hush.accounting.pld.privacy_loss import (
    UNIT,
    Array,
    CellMasses,
    Direction,
    Step,
    cell_masses,
    loss_range,
    privacy_loss,
    reach,
)

# An atom this close to its grid point, relatively, counts as being on it; `compose` pays for it.
SNAP = 1e-13
_ROUNDS = 60
_LEAST_CELLS = 4
# Points of the lattices that are kept for reuse: 32 MB of those above the steps, and of those below.
_MOST_KEPT = 1 << 22
# What two ways of computing one loss may differ by.
_CLOSE = 64 * UNIT
# Sums over a grid are off by less than this.
_OUTWARD = 1 + 1e-6


@dataclass(frozen=True, eq=False)
class Lattice:
    """Mass `masses[j]` at loss `origin + (first + j) * width`, and `infinite` mass beyond any loss."""

    origin: float
    first: int
    width: float
    masses: Array
    infinite: float = 0.0

    @property
    def losses(self) -> Array:
        return _points(self.origin, self.first, len(self.masses), self.width)


class _Make(Protocol):
    def __call__(self, step: Step, direction: Direction, width: float, tail: float, /) -> Lattice: ...


class _Reused:
    """A function whose latest lattices are kept, as many as `_MOST_KEPT` points hold."""

    def __init__(self, make: _Make) -> None:
        self.__wrapped__ = make
        self._kept: OrderedDict[tuple[Step, Direction, float, float], Lattice] = OrderedDict()

    def __call__(self, step: Step, direction: Direction, width: float, tail: float) -> Lattice:
        key = (step, direction, width, tail)
        found = self._kept.pop(key, None) or self.__wrapped__(*key)
        self._kept[key] = found
        while sum(len(lattice.masses) for lattice in self._kept.values()) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return found

    def cache_clear(self) -> None:
        """Forget all of them."""
        self._kept.clear()


@_Reused
def pessimistic(step: Step, direction: Direction, width: float, tail: float) -> Lattice:
    """A lattice that dominates the step.

    Connect-the-dots (Doroshenko et al. 2022): the mass between two grid points goes to those two
    points so that both laws keep theirs. What lies beyond the grid, `tail` at most, is infinite.
    """
    low, high = reach(step, direction, tail)
    first = math.floor(low / width)
    points = _points(0.0, first, math.ceil(high / width) + 1 - first, width)
    cut = cell_masses(step, direction, points)
    inside = cut.first[1:-1]
    upward = inside - _at_loss(cut.second[1:-1], points[:-1])
    upward = np.clip(upward / -math.expm1(-width), 0.0, inside)
    masses = np.zeros(len(points))
    masses[:-1] = inside - upward
    masses[1:] += upward
    masses[0] += cut.first[0]
    masses += _slack(cut, width)
    return Lattice(0.0, first, width, masses, float(cut.first[-1] * (1 + 1e-9 + cut.error[-1])))


@_Reused
def optimistic(step: Step, direction: Direction, width: float, tail: float) -> Lattice:
    """A lattice that the step dominates.

    Bins around the grid points become one atom each (that is post-processing), and the atoms, a
    little off their grid points, are fused onto them.
    """
    low, high = reach(step, direction, tail)
    origin = _origin(step, direction, width)
    first = math.floor((low - origin) / width) - 1
    points = _points(origin, first, math.ceil((high - origin) / width) + 3 - first, width)
    cuts = points[:-1] + width / 2
    _isolate_end(step, direction, points, cuts)
    cut = cell_masses(step, direction, cuts)
    # Lowering an atom's loss by one point is always allowed. It is done where the second law's
    # mass underflows, so that the atom's place is unknown, and above the last cut; what lies
    # below the first cut is lowered out of sight.
    tails = _tails(cut.first)
    lowered = (cut.second < 1e-290) & (cut.first > 0)
    lowered[-1] = True
    places = np.flatnonzero(lowered[1:])
    moved = cut.first[1:][places]
    for law in (cut.first, cut.second):
        law[lowered], law[0] = 0.0, 0.0
    masses = _fused(cut.first, cut.second, points, width)
    masses[places] += moved
    error = cut.error
    del cut, cuts, points, lowered
    masses *= _kept(masses, tails, error, width)
    return Lattice(origin, first, width, masses)


def _slack(cut: CellMasses, width: float) -> Array:
    """Mass to add at each point, so that no rounding leaves too little at a point and above it.

    What is above a point is off by `error` of all the mass above the point before: what is added there
    and above is the largest of these from there on. docs/guarantees/poisson-gaussian.md, step 8.
    """
    off = _OUTWARD * cut.error[:-1] * _tails(cut.first)[:-1] / -math.expm1(-width)
    most = np.maximum.accumulate(off[::-1])[::-1]
    added: Array = most - np.append(most[1:], 0.0)
    return added


def _kept(masses: Array, tails: Array, error: Array, width: float) -> Array:
    """Which share of each mass to keep, so that no rounding leaves too much at a point and above it.

    `tails` are what all bins from each on hold. What is left above a point is off by `error` of the tail
    at the point before it that holds any mass: there the line through the two begins.
    """
    before = np.maximum.accumulate(np.where(masses > 0, np.arange(len(masses)), 0))
    off = tails[np.append(0, before[:-1])]
    del before
    off *= error
    off *= _OUTWARD / -math.expm1(-width)
    left = _tails(masses)
    with np.errstate(over="ignore"):  # beyond any number: nothing is certain there
        share = np.divide(off, left, out=np.full(len(left), np.inf), where=left > 0)
    np.maximum.accumulate(share, out=share)
    # 1 / (1 + 2 x) <= 1 - x up to x = 1/2; beyond, nothing is certain of what is left
    kept: Array = np.where(share < 0.5, 1 / (1 + 2 * share), 0.0)
    return kept


def _tails(masses: Array) -> Array:
    """The mass at each place and above it."""
    return np.cumsum(masses[::-1])[::-1]


def fitted(step: Step, direction: Direction, width: float) -> float:
    """The width, close to `width`, with which `below` keeps both ends of a bounded loss.

    No lattice below the step reaches beyond its greatest loss. If that is an atom, as under
    Laplace noise, and off the grid, then half the mass may lose half a width, in every step.
    """
    end = _light_end(step, direction)
    count = max(_LEAST_CELLS, math.floor(abs(end - _origin(step, direction, width)) / width))
    for _ in range(_ROUNDS):
        before, width = width, abs(end - _origin(step, direction, width)) / count
        if abs(width - before) <= 4 * UNIT * width:
            break
    return width


def _isolate_end(step: Step, direction: Direction, points: Array, cuts: Array) -> None:
    """Move the cut beside a bounded loss's light end next to it, if that end is on the grid.

    Its atom then keeps its place, as its bin holds nothing else. Any cut between two points will do.
    """
    end = _light_end(step, direction)
    if math.isfinite(end):
        close = _CLOSE * (1 + abs(end))
        nearest = int(np.argmin(np.abs(points - end)))
        if abs(points[nearest] - end) <= close:
            inward = -1 if direction is Direction.REMOVE else 1
            cuts[nearest + min(inward, 0)] = end + 2 * inward * close


def _light_end(step: Step, direction: Direction) -> float:
    """The extreme loss that the record's own noise has; the one without it is at the origin."""
    low, high = loss_range(step, direction)
    return high if direction is Direction.REMOVE else low


def _points(origin: float, first: int, count: int, width: float) -> Array:
    points: Array = origin + np.arange(first, first + count, dtype=float) * width
    return points


def _at_loss(second_law: Array, losses: Array) -> Array:
    """The first law's mass if all of `second_law` had the given losses."""
    # in place: these arrays are as long as the grid
    with np.errstate(divide="ignore"):
        scaled: Array = np.log(second_law)
    scaled += losses
    np.minimum(scaled, 700.0, out=scaled)
    return np.exp(scaled, out=scaled)


def _origin(step: Step, direction: Direction, width: float) -> float:
    """A grid offset that puts the atom of the heaviest bin on a grid point.

    With a small rate almost every step has nearly the same loss; rounding that one by half a
    grid width, thousands of times, would cost all of the lower bound.
    """
    heaviest = float(privacy_loss(step, direction, np.zeros(1), 0.0)[0])
    for _ in range(8):
        cut = cell_masses(step, direction, np.array([heaviest - width / 2, heaviest + width / 2]))
        if cut.first[1] <= 0 or cut.second[1] <= 0:
            return 0.0
        heaviest = math.log(cut.first[1] / cut.second[1])
    return heaviest


def _fused(first_law: Array, second_law: Array, points: Array, width: float) -> Array:
    """The first law's masses after moving each bin's atom onto its grid point, never outward.

    In z = exp(epsilon) the bins' hockey-stick curve is a maximum of tangents T_i, one per cut. Its
    kinks are pulled onto the grid by taking min(T_i, T_{i+1}) at z_i and joining these values.
    """
    # The outermost bins have no neighbour beyond them to be joined to. Merge bins there until
    # the top atom is not below its point and the bottom atom not above (up to SNAP), but not so
    # far that a value would be negative.
    top, heaviest = _top(first_law, second_law, points)
    bottom, lightest = _bottom(first_law, second_law, points)
    if bottom < 0 or top - bottom < 2:
        return np.append(first_law[1:], 0.0)
    merged, second_merged = first_law[:top].copy(), second_law[:top].copy()
    merged[-1], second_merged[-1] = heaviest
    merged[:bottom], second_merged[:bottom] = 0.0, 0.0
    merged[bottom], second_merged[bottom] = lightest

    masses = _at_loss(second_merged, points[:top])
    gap = merged - masses
    del merged, second_merged
    gap[-1] = max(gap[-1], 0.0)
    bend = (np.maximum(-gap[:-1], 0.0) - np.maximum(gap[1:], 0.0)) / -math.expm1(-width)
    masses[:-1] += bend * math.exp(-width)
    masses[1:] -= bend
    del gap, bend
    joined = _convex(masses, width)
    if joined is None:
        return np.append(first_law[1:], 0.0)
    return np.append(joined, np.zeros(len(points) - top))


def _top(first_law: Array, second_law: Array, points: Array) -> tuple[int, tuple[float, float]]:
    """How many bins are left when those at the top are merged, and both laws' mass in the last one."""
    tops, second_tops = (np.cumsum(law[::-1])[::-1] for law in (first_law, second_law))
    excess = _at_loss(second_tops, points)
    np.subtract(tops, excess, out=excess)
    top = int(np.argmax((excess < -SNAP * tops) | (tops == 0)))
    return top, (float(tops[top - 1]), float(second_tops[top - 1]))


def _bottom(first_law: Array, second_law: Array, points: Array) -> tuple[int, tuple[float, float]]:
    """The first bin that is left when those at the bottom are merged, and both laws' mass in it."""
    # the totals summed from the top, as in `_top`
    total, second_total = (float(np.cumsum(law[::-1])[-1]) for law in (first_law, second_law))
    negative = total < _at_loss(np.full(len(points), second_total), points)
    bottoms, second_bottoms = np.cumsum(first_law), np.cumsum(second_law)
    excess = _at_loss(second_bottoms, points)
    np.subtract(bottoms, excess, out=excess)
    rising = excess > SNAP * bottoms
    bottom = min(int(np.argmin(rising | (bottoms == 0))), int(np.argmax(negative)) - 1)
    return bottom, (float(bottoms[bottom]), float(second_bottoms[bottom]))


def _convex(masses: Array, width: float) -> Array | None:
    """The masses of the greatest convex minorant: points of negative mass are left out.

    A point left out gives its mass to the kept points around it, so that both laws' totals stay.
    None if that goes on for too long: then the grid is too coarse for anything but lowering.
    """
    masses = masses.copy()
    kept = np.arange(len(masses))
    masses[-1] = max(masses[-1], 0.0)
    for _ in range(_ROUNDS):
        dropped = kept[masses[kept] < 0]
        if not len(dropped):
            return masses
        kept = kept[masses[kept] >= 0]
        after = np.searchsorted(kept, dropped)
        right, left = kept[after], kept[np.maximum(after - 1, 0)]
        inner = after > 0
        share = np.empty(len(dropped))
        span = (right - left)[inner] * width
        share[inner] = np.expm1(-(dropped - left)[inner] * width) / np.expm1(-span)
        # Left of all kept points only the second law's mass can be kept.
        share[~inner] = np.exp((right - dropped)[~inner] * width)
        lost = masses[dropped]
        masses[dropped] = 0.0
        np.add.at(masses, right, share * lost)
        np.add.at(masses, left[inner], ((1 - share) * lost)[inner])
        # Never negative but for rounding: the curve ends at zero and is positive before.
        masses[-1] = max(masses[-1], 0.0)
    return None
