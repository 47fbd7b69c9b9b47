"""Bounds on the best of a random number of trials, from the privacy profile or the RDP of one trial.

**Guarantee.** docs/guarantees/tuning.md, steps 3 to 6: for any trial whose profile and RDP are at most
those given, whatever is the best one's order.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.selection.trial_count import (
    DRAW_DISTANCE,
    TrialCount,
    TruncatedNegativeBinomial,
    TruncatedPoisson,
)

# Orders of the divergence that bounds how much likelier one data set makes a better trial.
_ORDERS: Array = np.concatenate([1 + np.geomspace(1e-2, 1, 12), np.arange(3.0, 65.0), [128.0, 256.0]])
# Probabilities that a trial is better: dense where it is much less likely than the trials are few.
_PROBABILITIES: Array = np.unique(
    np.concatenate([[0.0], np.geomspace(1e-8, 1, 800), np.linspace(0, 1, 2001)])
)
# Outweighs the rounding of a line's height and of where lines meet (tuning.md 4): 1e-9 is 9e6 units.
_MARGIN = 1e-9

Line = tuple[float, float]
"""Height at 0, and slope downward."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Upper bounds on delta of one trial as a function of epsilon, at `epsilons` that begin with 0.

    delta is convex in exp(epsilon), so that chords between the points are bounds too.
    """

    epsilons: Array
    deltas: Array

    def __call__(self, epsilon: Array) -> Array:
        """Upper bound on delta at each epsilon, which may be negative."""
        size = np.abs(epsilon)
        right = np.clip(np.searchsorted(self.epsilons, size, side="right"), 1, len(self.epsilons) - 1)
        low, high = self.epsilons[right - 1], self.epsilons[right]
        share = np.minimum(np.expm1(size - low) / np.expm1(high - low), 1.0)
        chord = (1 - share) * self.deltas[right - 1] + share * self.deltas[right]
        # H_z(P, Q) = 1 - z + z H_{1/z}(Q, P)
        return np.where(epsilon >= 0, chord, -np.expm1(-size) + np.exp(-size) * chord)

    def largest_probability(self, probability: Array) -> Array:
        """Upper bound on an event's probability under the neighbour, given that under the data set."""
        odds, p = np.exp(self.epsilons), np.asarray(probability)[:, None]
        above = (odds * p + self.deltas).min(axis=1)
        below = (1 - (1 - p - self.deltas) / odds).min(axis=1)
        largest: Array = np.minimum(np.minimum(above, below) * OUTWARD, 1.0)
        return largest


@dataclass(frozen=True, eq=False)
class SelectionProfile:
    """Privacy profile of a selection: delta(epsilon) <= sum of weight * trial(epsilon - shift)."""

    trial: Profile
    weights: Array
    shifts: Array

    def __call__(self, epsilon: float) -> float:
        """Upper bound on delta at an epsilon >= 0."""
        total = float(self.weights @ self.trial(epsilon - self.shifts)) * (1 + _MARGIN)
        return min(1.0, total + DRAW_DISTANCE * (1 + math.exp(min(epsilon, 700.0))))


def selection_profile(trial: Profile, number: TrialCount) -> SelectionProfile:
    """Privacy profile of the best of a random number of trials: tuning.md 3 to 5.

    Each probability s that a trial is better gives a line w(s) - w(s') x in the scaled ratio x of the
    neighbour's density; their upper envelope is a sum of hinges weight * (1 - x exp(-shift))+.

    Args:
        trial: Privacy profile of one trial.
        number: Law of the number of trials.
    """
    heights = number.weight(_PROBABILITIES[:-1])
    slopes = number.weight(trial.largest_probability(_PROBABILITIES[1:])) * (1 - _MARGIN)
    hull: list[Line] = []
    for line in [*zip(heights.tolist(), slopes.tolist(), strict=True), (0.0, 0.0)]:
        if hull and line[1] >= hull[-1][1]:
            continue  # no higher anywhere
        while hull and _crossing(hull[-1], line) <= _last_crossing(hull):
            hull.pop()
        hull.append(line)
    crossings = [(_crossing(steep, flat), steep[1] - flat[1]) for steep, flat in pairwise(hull)]
    place, steeper = np.array(crossings).T
    return SelectionProfile(trial, place * steeper, np.log(place))


def selection_rdp(
    orders: Array,
    trial: Callable[[Array], Array],
    profile: SelectionProfile,
    number: TruncatedNegativeBinomial | TruncatedPoisson,
) -> Array:
    """RDP of the best of a random number of trials: Papernot and Steinke 2022, Theorems 2 and 6.

    Args:
        orders: Rényi orders above 1.
        trial: RDP of one trial at each order of an array.
        profile: Privacy profile of the selection, and of one trial.
        number: Law of the number of trials.
    """
    chosen = math.log(number.mean) / (orders - 1)
    if isinstance(number, TruncatedPoisson):
        return OUTWARD * (
            trial(orders) + number.rate * profile.trial(np.log1p(1 / (orders - 1))) + chosen
        )
    per_shape = (1 - 1 / _ORDERS) * trial(_ORDERS) - math.log(number.stop) / _ORDERS
    # the last hinge is at the largest ratio of w(s) to w(s')
    ratio = min((1 + number.shape) * float(per_shape.min()), float(profile.shifts.max()))
    return OUTWARD * (trial(orders) + max(ratio, 0.0) + chosen)


def _crossing(steep: Line, flat: Line) -> float:
    """Where two lines meet."""
    return (steep[0] - flat[0]) / (steep[1] - flat[1])


def _last_crossing(hull: list[Line]) -> float:
    """Where the last line of an envelope takes over from the one before; 0 for the first."""
    return _crossing(hull[-2], hull[-1]) if len(hull) > 1 else 0.0
