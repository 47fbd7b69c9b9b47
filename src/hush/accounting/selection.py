"""Private selection (the best of a random number of runs) as a step of a composition.

**Guarantee.** The cost of a single selection is the smaller of two bounds, from the privacy profile and
from the RDP of one run. A composition uses the bound from RDP. Proof: docs/guarantees/tuning.md.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from hush.accounting.numerics import OUTWARD, Array, bisect
from hush.accounting.pld import accountant
from hush.accounting.steps import ComposableStep, PairedStep
from hush.core.release import BestOf

DRAW_DISTANCE = 1e-30
"""Upper bound on the total variation distance between the sampled and the accounted distribution."""
_DIGITS, _WORKING_DIGITS = 40, 70


@dataclass(frozen=True)
class TruncatedNegativeBinomial:
    """Truncated negative binomial: P(k) proportional to (1 - stop)^k (shape)_k / k! for k >= 1.

    It is logarithmic for shape 0, and geometric for shape 1. Reference: Papernot and Steinke 2022,
    Definition 1.
    """

    shape: float
    stop: float
    """gamma in the paper."""

    @property
    def mean(self) -> float:
        """Expected number of trials f'(1), rounded up."""
        return OUTWARD * _negative_binomial_mean(self.shape, self.stop)

    def weight(self, better: Array) -> Array:
        """w(s) = f'(1 - s), decreasing in the probability s that a trial is better."""
        share = self.stop / (self.stop + (1 - self.stop) * better)
        return np.asarray(self.mean * share ** (self.shape + 1))

    def probabilities(self) -> Iterator[Decimal]:
        """Probabilities of 1, 2, 3, ... trials, to `_WORKING_DIGITS` digits."""
        shape, stop = Decimal(self.shape), Decimal(self.stop)
        odds = (stop**-shape - 1) / shape if self.shape else -stop.ln()
        probability = (1 - stop) / odds
        number = 1
        while True:
            yield probability
            probability *= (1 - stop) * (number + shape) / (number + 1)
            number += 1


@dataclass(frozen=True)
class TruncatedPoisson:
    """Poisson distribution conditioned on at least 1; methods as in `TruncatedNegativeBinomial`."""

    rate: float

    @cached_property
    def mean(self) -> float:
        return OUTWARD * self.rate / -math.expm1(-self.rate)

    def weight(self, better: Array) -> Array:
        return np.asarray(self.mean * np.exp(-self.rate * better))

    def probabilities(self) -> Iterator[Decimal]:
        rate = Decimal(self.rate)
        probability = rate / (rate.exp() - 1)
        number = 1
        while True:
            yield probability
            number += 1
            probability *= rate / number


TrialCount = TruncatedNegativeBinomial | TruncatedPoisson
"""Distribution of the number of trials, which is at least 1."""


def draw_trials(number: TrialCount, randbelow: Callable[[int], int]) -> int:
    """Draw a number of trials by inverse transform sampling in decimal arithmetic."""
    with localcontext() as context:
        context.prec = _WORKING_DIGITS
        uniform = Decimal(randbelow(10**_DIGITS)) / 10**_DIGITS
        cumulative = Decimal(0)
        for trials, probability in enumerate(number.probabilities(), start=1):
            cumulative += probability
            # the remaining probability is below the precision
            if uniform < cumulative or 1 - cumulative < Decimal(10) ** -_DIGITS:
                return trials
    raise AssertionError("probabilities sum to 1")


def trial_count(release: BestOf) -> TrialCount:
    """Distribution of the number of trials of a `BestOf` release."""
    if release.law == "poisson":
        rate, _ = bisect(lambda rate: TruncatedPoisson(rate).mean <= release.mean, 1e-9, release.mean)
        return TruncatedPoisson(rate)
    stop, _ = bisect(
        lambda stop: _negative_binomial_mean(release.shape, stop) <= release.mean, 1 - 1e-6, 1e-12
    )
    return TruncatedNegativeBinomial(release.shape, stop)


def _negative_binomial_mean(shape: float, stop: float) -> float:
    log_stop = math.log(stop)
    if shape == 0:
        return (1 - stop) / stop / -log_stop
    return shape * (1 - stop) / stop / -math.expm1(shape * log_stop)


# Orders for bounds on the ratio of probabilities from RDP.
_ORDERS: Array = np.concatenate([1 + np.geomspace(1e-2, 1, 12), np.arange(3.0, 65.0), [128.0, 256.0]])
# Probabilities that a trial is better: smallest one, numbers of cells by logarithm and by weight.
_SMALLEST, _BY_LOGARITHM, _BY_WEIGHT = 1e-8, 900, 1500
# Shift of a trial's profile that leaves delta at 1.
_NO_BOUND = 1e300
# Weights below exp(-_NEGLIGIBLE) of the largest have no cells of their own.
_NEGLIGIBLE = 40.0
# Relative slack for rounding of heights and intersections of lines (tuning.md, step 4).
_MARGIN = 1e-9

Line = tuple[float, float]
"""Height at 0, and negative slope."""


@dataclass(frozen=True, eq=False)
class Profile:
    """Upper bounds on delta of one trial at `epsilons`, which start at 0.

    delta is convex in exp(epsilon), so chords between the points are also upper bounds.
    """

    epsilons: Array
    deltas: Array

    def __call__(self, epsilon: Array) -> Array:
        """Upper bound on delta at each epsilon. The epsilons may be negative."""
        size = np.abs(epsilon)
        right = np.clip(np.searchsorted(self.epsilons, size, side="right"), 1, len(self.epsilons) - 1)
        low, high = self.epsilons[right - 1], self.epsilons[right]
        share = np.expm1(np.minimum(size, high) - low) / np.expm1(high - low)
        chord = (1 - share) * self.deltas[right - 1] + share * self.deltas[right]
        # H_z(P, Q) = 1 - z + z H_{1/z}(Q, P)
        return np.where(epsilon >= 0, chord, -np.expm1(-size) + np.exp(-size) * chord)

    def largest_probability(self, probability: Array) -> Array:
        """Upper bound on a probability under the neighbouring data set."""
        odds, p = np.exp(self.epsilons), np.asarray(probability)[:, None]
        above = (odds * p + self.deltas).min(axis=1)
        below = (1 - (1 - p - self.deltas) / odds).min(axis=1)
        return np.asarray(np.minimum(np.minimum(above, below) * OUTWARD, 1.0))


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
    """Privacy profile of the best of a random number of trials: tuning.md, steps 3 to 5.

    Each probability s that a trial is better gives a line w(s) - w(s') x in the scaled density ratio x.
    The upper envelope of the lines is a sum of hinges weight * (1 - x exp(-shift))+.
    """
    places = _probabilities(number)
    better = number.weight(trial.largest_probability(places))
    heights, slopes = _enclosing_lines(places, number.weight(places), better)
    slopes *= 1 - _MARGIN
    hull: list[Line] = []
    for line in [*zip(heights.tolist(), slopes.tolist(), strict=True), (0.0, 0.0)]:
        if hull and line[1] >= hull[-1][1]:
            continue  # never the maximum
        # drop lines below the upper envelope
        while hull and _crossing(hull[-1], line) <= (_crossing(*hull[-2:]) if len(hull) > 1 else 0.0):
            hull.pop()
        hull.append(line)
    crossings = [(_crossing(steep, flat), steep[1] - flat[1]) for steep, flat in pairwise(hull)]
    if not crossings:  # all weights w(s') underflow: no delta below 1 is proved
        return SelectionProfile(trial, np.ones(1), np.array([_NO_BOUND]))
    place, steeper = np.array(crossings).T
    return SelectionProfile(trial, place * steeper, np.log(place))


def _probabilities(number: TrialCount) -> Array:
    """Probabilities that a trial is better: 0 to 1, in cells with similar weights and logarithms."""
    mesh = np.geomspace(_SMALLEST, 1.0, 20_001)
    with np.errstate(divide="ignore"):
        fall = np.minimum(-np.log(number.weight(mesh) / number.mean), _NEGLIGIBLE)
    fall -= fall[0]
    place = _BY_LOGARITHM * np.log(mesh / _SMALLEST) / -math.log(_SMALLEST)
    place += _BY_WEIGHT * fall / fall[-1]
    cells = np.interp(np.linspace(0.0, place[-1], _BY_LOGARITHM + _BY_WEIGHT + 1), place, mesh)
    return np.concatenate([[0.0], cells[:-1], [1.0]])


def _enclosing_lines(places: Array, first: Array, second: Array) -> tuple[Array, Array]:
    """Heights and slopes of lines with an envelope above all lines w(s) - h(s) x, 0 <= s <= 1.

    `first` and `second` are the convex, non-increasing w and h at `places`: tuning.md 4.
    """
    width = np.diff(places)
    fall = np.diff(second) / width
    # from the second cell on: h is above the extended chords of the two neighbouring cells
    middle = second[1:-1] + fall[:-1] * width[1:] / 2
    middle[:-1] = np.minimum(middle[:-1], second[2:-1] - fall[2:] * width[1:-1] / 2)
    height = (first[1:-1] + first[2:]) / 2
    end = second[-2] + fall[-2] * width[-1]
    # where the chords are too steep, w and h at the two ends of the cell
    steep = middle < second[2:]
    middle[steep], height[steep] = second[2:][steep], first[1:-1][steep]
    if end < second[-1] / 2:
        middle[-1], height[-1], end = second[-1], first[-2], second[-1]
    heights = [first[:1], np.stack([first[1:-1], height], axis=1).ravel(), first[-1:]]
    slopes = [second[1:2], np.stack([second[1:-1], middle], axis=1).ravel(), np.array([end])]
    return np.concatenate(heights), np.concatenate(slopes)


def selection_rdp(
    orders: Array, trial: Callable[[Array], Array], profile: SelectionProfile, number: TrialCount
) -> Array:
    """RDP of the best of a random number of trials: Papernot and Steinke 2022, Theorems 2 and 6."""
    chosen = math.log(number.mean) / (orders - 1)
    if isinstance(number, TruncatedPoisson):
        return OUTWARD * (
            trial(orders) + number.rate * profile.trial(np.log1p(1 / (orders - 1))) + chosen
        )
    per_shape = (1 - 1 / _ORDERS) * trial(_ORDERS) - math.log(number.stop) / _ORDERS
    # the last hinge is the largest ratio of w(s) to w(s')
    ratio = min((1 + number.shape) * float(per_shape.min()), float(profile.shifts.max()))
    return OUTWARD * (trial(orders) + max(ratio, 0.0) + chosen)


def _crossing(steep: Line, flat: Line) -> float:
    """Intersection of two lines."""
    return (steep[0] - flat[0]) / (steep[1] - flat[1])


# Number of points of a trial's profile, and its smallest delta.
_POINTS, _MIN_DELTA = 128, 1e-12
# Epsilons above the maximum count as infinite.
_MIN_EPSILON, _MAX_EPSILON = 1e-6, 600.0

Trials = tuple[tuple[tuple[PairedStep, int], ...], ...]


@dataclass(frozen=True)
class Selection(ComposableStep):
    """Private selection of the best of a random number of runs.

    A record is used either for training or for the score on held-out records: `trials` has the steps of
    each case.
    """

    trials: Trials
    number: TrialCount

    charged_for_groups = False

    @property
    def dominated_composition(self) -> tuple[tuple[PairedStep, int], ...]:
        """One run: with a constant score the winner has its law."""
        return self.trials[0]

    def rdp(self, orders: Array) -> Array:
        return selection_rdp(orders, self._trial_rdp, _profile(self.trials, self.number), self.number)

    def delta_upper(self, epsilon: float) -> float:
        return _profile(self.trials, self.number)(epsilon)

    def _trial_rdp(self, orders: Array) -> Array:
        """RDP of one trial: the larger of training and score."""
        totals = [
            np.sum([count * step.rdp(orders) for step, count in steps], axis=0) for steps in self.trials
        ]
        return np.asarray(np.max(totals, axis=0))


@lru_cache(maxsize=64)
def _profile(trials: Trials, number: TrialCount) -> SelectionProfile:
    """Privacy profile of a selection, from the maximum of the profiles of training and score."""
    counts = [dict(steps) for steps in trials]
    end = max(accountant.epsilon(steps, _MIN_DELTA).upper for steps in counts)
    trial = Profile(np.array([0.0, 1.0]), np.ones(2))
    if end <= _MAX_EPSILON:
        epsilons = np.linspace(0.0, max(end, _MIN_EPSILON), _POINTS)
        deltas = np.max([accountant.profile_upper(steps, list(epsilons)) for steps in counts], axis=0)
        # a bound at a smaller epsilon is also a bound at a larger epsilon
        trial = Profile(epsilons, np.minimum.accumulate(deltas))
    return selection_profile(trial, number)
