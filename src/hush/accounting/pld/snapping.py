"""Optimistic rounding of a discrete privacy loss distribution onto a grid.

Moves each atom onto its grid point so that the hockey-stick divergence never grows: the result is
dominated by the distribution. docs/guarantees/poisson-gaussian.md, step 5.
"""

import math

import numpy as np

from hush.accounting.pld.privacy_loss import Array

# An atom this close to its grid point, relatively, counts as being on it; `compose` pays for it.
SNAP = 1e-13
_MAX_ROUNDS = 60


def snap_to_grid(first_law: Array, second_law: Array, points: Array, width: float) -> Array:
    """The first law's masses on the grid `points`, where each bin's atom lies near its point.

    In z = exp(epsilon) the bins' hockey-stick curve is a maximum of tangents T_i, one per cut. Its
    kinks are pulled onto the grid by taking min(T_i, T_{i+1}) at z_i and joining these values.
    """
    # The outermost bins have no neighbour beyond them to be joined to. Merge bins there until
    # the top atom is not below its point and the bottom atom not above (up to SNAP), but not so
    # far that a value would be negative.
    top, highest = _merge_top(first_law, second_law, points)
    bottom, lowest = _merge_bottom(first_law, second_law, points)
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


def _merge_top(first_law: Array, second_law: Array, points: Array) -> tuple[int, tuple[float, float]]:
    """Number of bins left when those at the top are merged, and both laws' mass in the last one."""
    tops, second_tops = (np.cumsum(law[::-1])[::-1] for law in (first_law, second_law))
    excess = first_law_mass(second_tops, points)
    np.subtract(tops, excess, out=excess)
    top = int(np.argmax((excess < -SNAP * tops) | (tops == 0)))
    return top, (float(tops[top - 1]), float(second_tops[top - 1]))


def _merge_bottom(first_law: Array, second_law: Array, points: Array) -> tuple[int, tuple[float, float]]:
    """The first bin that is left when those at the bottom are merged, and both laws' mass in it."""
    # the totals summed from the top, as in `_merge_top`
    total, second_total = (float(np.cumsum(law[::-1])[-1]) for law in (first_law, second_law))
    negative = total < first_law_mass(np.full(len(points), second_total), points)
    bottoms, second_bottoms = np.cumsum(first_law), np.cumsum(second_law)
    excess = first_law_mass(second_bottoms, points)
    np.subtract(bottoms, excess, out=excess)
    rising = excess > SNAP * bottoms
    bottom = min(int(np.argmin(rising | (bottoms == 0))), int(np.argmax(negative)) - 1)
    return bottom, (float(bottoms[bottom]), float(second_bottoms[bottom]))


def _convex_minorant(masses: Array, width: float) -> Array | None:
    """Masses of the greatest convex minorant of the hockey-stick curve: none is negative.

    A dropped point gives its mass to the remaining points around it, so that both laws' totals stay.
    None if that takes too many rounds: then the grid is too coarse for anything but lowering losses.
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
        # Left of all remaining points only the second law's mass can be preserved.
        share[~inner] = np.exp((right - dropped)[~inner] * width)
        moved = masses[dropped]
        masses[dropped] = 0.0
        np.add.at(masses, right, share * moved)
        np.add.at(masses, left[inner], ((1 - share) * moved)[inner])
        # Never negative but for rounding: the curve ends at zero and is positive before.
        masses[-1] = max(masses[-1], 0.0)
    return None


def first_law_mass(second_law: Array, losses: Array) -> Array:
    """The first law's mass if all of `second_law` had the given losses."""
    # in place: these arrays are as long as the grid
    with np.errstate(divide="ignore"):
        scaled: Array = np.log(second_law)
    scaled += losses
    np.minimum(scaled, 700.0, out=scaled)
    return np.exp(scaled, out=scaled)
