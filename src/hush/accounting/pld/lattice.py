"""Discretised privacy loss distributions of one step: pessimistic and optimistic.

Only the probabilities under the first distribution are stored; those under the second distribution are
exp(-loss) times as large. Proofs: docs/guarantees/poisson-gaussian.md.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hush.accounting.numerics import UNIT, Array
from hush.accounting.pld.privacy_loss import Direction, Step

# An atom within this relative distance counts as being on the grid point; `compose` adds the error.
SNAP = 1e-13
_MAX_ROUNDS = 60


def snap_to_grid(first_law: Array, second_law: Array, points: Array, width: float) -> Array:
    """Probability masses of the first distribution on `points`, from bins with an atom near each point.

    The kinks of the hockey-stick curve are moved onto the grid.
    """
    bottom, lowest, top, highest = _merge_ends(first_law, second_law, points)
    if bottom < 0 or top - bottom < 2:
        return np.append(first_law[1:], 0.0)
    merged, second_merged = first_law[:top].copy(), second_law[:top].copy()
    merged[-1], second_merged[-1] = highest
    merged[:bottom], second_merged[:bottom] = 0.0, 0.0
    merged[bottom], second_merged[bottom] = lowest

    masses = first_law_mass(second_merged, points[:top])
    gap = merged - masses
    del merged, second_merged
    gap[-1] = max(gap[-1], 0.0)
    bend = (np.maximum(-gap[:-1], 0.0) - np.maximum(gap[1:], 0.0)) / -math.expm1(-width)
    masses[:-1] += bend * math.exp(-width)
    masses[1:] -= bend
    del gap, bend
    convex = _convex_minorant(masses, width)
    if convex is None:
        return np.append(first_law[1:], 0.0)
    return np.append(convex, np.zeros(len(points) - top))


def _merge_ends(
    first_law: Array, second_law: Array, points: Array
) -> tuple[int, tuple[float, float], int, tuple[float, float]]:
    """First and last bin after merging the outermost bins, with their masses under both distributions.

    Bins are merged until the top atom is not below its point and the bottom atom is not above its point
    (up to SNAP), unless a value would become negative.
    """
    tops, second_tops = _survival(first_law), _survival(second_law)
    excess = first_law_mass(second_tops, points)
    np.subtract(tops, excess, out=excess)
    top = int(np.argmax((excess < -SNAP * tops) | (tops == 0)))
    highest = float(tops[top - 1]), float(second_tops[top - 1])
    negative = tops[0] < first_law_mass(np.full(len(points), second_tops[0]), points)
    del tops, second_tops
    bottoms, second_bottoms = np.cumsum(first_law), np.cumsum(second_law)
    excess = first_law_mass(second_bottoms, points)
    np.subtract(bottoms, excess, out=excess)
    rising = excess > SNAP * bottoms
    bottom = min(int(np.argmin(rising | (bottoms == 0))), int(np.argmax(negative)) - 1)
    return bottom, (float(bottoms[bottom]), float(second_bottoms[bottom])), top, highest


def _convex_minorant(masses: Array, width: float) -> Array | None:
    """Non-negative masses of the greatest convex minorant of the hockey-stick curve.

    The mass of a dropped point is moved to the neighbouring points, which preserves the totals under
    both distributions. Returns None after too many rounds.
    """
    masses = masses.copy()
    remaining = np.arange(len(masses))
    masses[-1] = max(masses[-1], 0.0)
    for _ in range(_MAX_ROUNDS):
        dropped = remaining[masses[remaining] < 0]
        if not len(dropped):
            return masses
        remaining = remaining[masses[remaining] >= 0]
        after = np.searchsorted(remaining, dropped)
        right, left = remaining[after], remaining[np.maximum(after - 1, 0)]
        inner = after > 0
        share = np.empty(len(dropped))
        span = (right - left)[inner] * width
        share[inner] = np.expm1(-(dropped - left)[inner] * width) / np.expm1(-span)
        # To the left of all remaining points, only the total of the second distribution is preserved.
        share[~inner] = np.exp((right - dropped)[~inner] * width)
        moved = masses[dropped]
        masses[dropped] = 0.0
        np.add.at(masses, right, share * moved)
        np.add.at(masses, left[inner], ((1 - share) * moved)[inner])
        # The curve is positive and ends at zero, so this is negative only by rounding.
        masses[-1] = max(masses[-1], 0.0)
    return None


def first_law_mass(second_law: Array, losses: Array) -> Array:
    """Masses under the first distribution, from those under the second distribution and the losses."""
    # in place, because these arrays are as long as the grid
    with np.errstate(divide="ignore"):
        scaled: Array = np.log(second_law)
    scaled += losses
    np.minimum(scaled, 700.0, out=scaled)
    return np.exp(scaled, out=scaled)


_MIN_CELLS = 4
# Number of cached lattices, each at most 16 MB.
_CACHED = 8
# Bound on the relative error of sums over a grid.
_OUTWARD = 1 + 1e-6


@dataclass(frozen=True, eq=False)
class Lattice:
    """Probability masses: `masses[j]` at loss `origin + (first + j) * width`, and `infinite_mass`."""

    origin: float
    first: int
    width: float
    masses: Array
    infinite_mass: float = 0.0
    loss_rounding: float = 32 * UNIT
    """Rounding error of the losses at the cuts, relative to 1 + the largest loss."""

    @property
    def losses(self) -> Array:
        return _grid(self.origin, self.first, len(self.masses), self.width)


@lru_cache(maxsize=_CACHED)
def pessimistic(step: Step, direction: Direction, width: float, tail: float) -> Lattice:
    """Lattice that dominates the step.

    Connect-the-dots (Doroshenko et al. 2022) moves the probability mass between two grid points to these
    points, and preserves the totals under both distributions. Losses beyond the grid, with probability
    at most `tail`, become infinite.
    """
    low, high = step.loss_quantiles(direction, tail)
    first = math.floor(low / width)
    points = _grid(0.0, first, math.ceil(high / width) + 1 - first, width)
    cut = step.cell_masses(direction, points)
    inside = cut.first[1:-1]
    upward = inside - first_law_mass(cut.second[1:-1], points[:-1])
    upward = np.clip(upward / -math.expm1(-width), 0.0, inside)
    masses = np.zeros(len(points))
    masses[:-1] = inside - upward
    masses[1:] += upward
    masses[0] += cut.first[0]
    # The error of the survival function at a point is relative to its value at the previous point. The
    # largest error from this point on is added as mass: docs/guarantees/poisson-gaussian.md, step 8.
    rounding = _OUTWARD * cut.error[:-1] * _survival(cut.first)[:-1] / -math.expm1(-width)
    bound = np.maximum.accumulate(rounding[::-1])[::-1]
    masses += bound - np.append(bound[1:], 0.0)
    infinite_mass = float(cut.first[-1] * (1 + 1e-9 + cut.error[-1]))
    return Lattice(0.0, first, width, masses, infinite_mass, step.loss_rounding)


@lru_cache(maxsize=_CACHED)
def optimistic(step: Step, direction: Direction, width: float, tail: float) -> Lattice:
    """Lattice that is dominated by the step: one atom per bin, moved onto a grid point."""
    low, high = step.loss_quantiles(direction, tail)
    origin = _origin(step, direction, width)
    first = math.floor((low - origin) / width) - 1
    points = _grid(origin, first, math.ceil((high - origin) / width) + 3 - first, width)
    cuts = points[:-1] + width / 2
    end = _extreme_loss(step, direction)
    if math.isfinite(end):
        # If the extreme of a bounded loss is on the grid, isolate it in its bin, so its atom does not
        # move. Every cut between two points is valid. `rounding` bounds the difference between two
        # formulas for the loss.
        rounding = 2 * step.loss_rounding * (1 + abs(end))
        nearest = int(np.argmin(np.abs(points - end)))
        if abs(points[nearest] - end) <= rounding:
            inward = -1 if direction is Direction.REMOVE else 1
            cuts[nearest + min(inward, 0)] = end + 2 * inward * rounding
    cut = step.cell_masses(direction, cuts)
    # Lowering the loss of an atom by one point is always valid. This is done above the last cut, and if
    # the probability under the second distribution underflows. Mass below the first cut is dropped.
    survival = _survival(cut.first)
    lowered = (cut.second < 1e-290) & (cut.first > 0)
    lowered[-1] = True
    places = np.flatnonzero(lowered[1:])
    moved = cut.first[1:][places]
    for law in (cut.first, cut.second):
        law[lowered], law[0] = 0.0, 0.0
    masses = snap_to_grid(cut.first, cut.second, points, width)
    masses[places] += moved
    error = cut.error
    del cut, cuts, points, lowered
    masses *= _certain_share(masses, survival, error, width)
    return Lattice(origin, first, width, masses, loss_rounding=step.loss_rounding)


def _certain_share(masses: Array, bin_survival: Array, error: Array, width: float) -> Array:
    """Factor on each mass that compensates for rounding errors of the survival function.

    The error of the survival function at a point is relative to its value at the nearest previous point
    with positive mass.
    """
    before = np.maximum.accumulate(np.where(masses > 0, np.arange(len(masses)), 0))
    rounding = bin_survival[np.append(0, before[:-1])]
    del before
    rounding *= error
    rounding *= _OUTWARD / -math.expm1(-width)
    survival = _survival(masses)
    with np.errstate(over="ignore"):  # on overflow, the factor is 0
        relative = np.divide(rounding, survival, out=np.full(len(survival), np.inf), where=survival > 0)
    np.maximum.accumulate(relative, out=relative)
    # 1 / (1 + 2 x) <= 1 - x for x <= 1/2; for larger x the factor is 0
    return np.asarray(np.where(relative < 0.5, 1 / (1 + 2 * relative), 0.0))


def _survival(masses: Array) -> Array:
    """Total mass at or above each point."""
    return np.cumsum(masses[::-1])[::-1]


def aligned_width(step: Step, direction: Direction, width: float) -> float:
    """Grid width near `width` that puts both ends of a bounded loss on the optimistic lattice.

    For other widths, an atom at the largest loss could lose half a grid width in every step.
    """
    end = _extreme_loss(step, direction)
    count = max(_MIN_CELLS, math.floor(abs(end - _origin(step, direction, width)) / width))
    for _ in range(_MAX_ROUNDS):
        before, width = width, abs(end - _origin(step, direction, width)) / count
        if abs(width - before) <= 4 * UNIT * width:
            break
    return width


def _extreme_loss(step: Step, direction: Direction) -> float:
    """Extreme loss of the shifted noise. The extreme loss of unshifted noise is the grid's origin."""
    return step.loss_range(direction)[direction is Direction.REMOVE]


def _grid(origin: float, first: int, count: int, width: float) -> Array:
    return np.asarray(origin + np.arange(first, first + count, dtype=float) * width)


def _origin(step: Step, direction: Direction, width: float) -> float:
    """Grid offset that puts the atom of the most probable bin on a grid point.

    At a small sampling rate almost every step has this loss, so rounding it would make the lower bound
    trivial.
    """
    heaviest = float(step.privacy_loss(direction, np.array([step.centre]))[0])
    low, high = step.ratio_range
    if heaviest == 0 and -low == high < math.inf:
        return heaviest  # between atoms at both extremes, which `aligned_width` puts on the grid
    for _ in range(8):
        cut = step.cell_masses(direction, np.array([heaviest - width / 2, heaviest + width / 2]))
        if cut.first[1] <= 0 or cut.second[1] <= 0:
            return 0.0
        heaviest = math.log(cut.first[1] / cut.second[1])
    return heaviest
