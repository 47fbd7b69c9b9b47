"""The best of a random number of runs as one step of a composition.

**Guarantee.** docs/guarantees/tuning.md. Where the selection is all that runs, the smaller of the bound
by the privacy profile of one run and of that by its RDP; beside other charges the latter.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hush.accounting.numerics import Array, bisect
from hush.accounting.pld import accountant
from hush.accounting.selection.bounds import (
    Profile,
    SelectionProfile,
    selection_profile,
    selection_rdp,
)
from hush.accounting.selection.trial_count import TruncatedNegativeBinomial, TruncatedPoisson
from hush.accounting.steps import ComposableStep, PairedStep

# Points at which the profile of a trial is known, up to the epsilon at this delta.
_POINTS, _MIN_DELTA = 128, 1e-12
# Beyond this epsilon nothing is private.
_TOLERANCE, _MAX_EPSILON = 1e-6, 600.0

Trials = tuple[tuple[tuple[PairedStep, int], ...], ...]
Number = TruncatedNegativeBinomial | TruncatedPoisson


@dataclass(frozen=True)
class Selection(ComposableStep):
    """The best of a random number of runs.

    `trials` are the mechanisms of one run, of which a record takes part in one: in the training steps,
    or in the score on held-out records.
    """

    trials: Trials
    number: Number

    @property
    def charged_for_groups(self) -> bool:
        return False

    @property
    def participation(self) -> float:
        return 1.0

    @property
    def unsampled(self) -> "Selection":
        return self

    def rdp(self, orders: Array) -> Array:
        return selection_rdp(orders, self._trial_rdp, self._profile, self.number)

    def delta_upper(self, epsilon: float) -> float:
        return self._profile(epsilon)

    def epsilon_upper(self, delta: float) -> float:
        high = 1.0
        while self._profile(high) > delta:
            high *= 2
            if high > _MAX_EPSILON:
                return math.inf
        return bisect(lambda epsilon: self._profile(epsilon) > delta, 0.0, high, tolerance=_TOLERANCE)[1]

    def _trial_rdp(self, orders: Array) -> Array:
        """RDP of one trial, the larger of that of its training and that of its score."""
        totals = [
            np.sum([count * step.rdp(orders) for step, count in steps], axis=0) for steps in self.trials
        ]
        largest: Array = np.max(totals, axis=0)
        return largest

    @property
    def _trial(self) -> Profile:
        return _trial_profile(self.trials)

    @property
    def _profile(self) -> SelectionProfile:
        return _profile(self.trials, self.number)


@lru_cache(maxsize=64)
def _trial_profile(trials: Trials) -> Profile:
    """Privacy profile of one trial, the larger of that of its training and that of its score."""
    counts = [dict(steps) for steps in trials]
    end = max(accountant.epsilon(steps, _MIN_DELTA).upper for steps in counts)
    if end > _MAX_EPSILON:
        return Profile(np.array([0.0, 1.0]), np.ones(2))
    epsilons = np.linspace(0.0, max(end, _TOLERANCE), _POINTS)
    deltas = np.max([accountant.profile_upper(steps, list(epsilons)) for steps in counts], axis=0)
    # a bound at a smaller epsilon is one at a larger epsilon too
    return Profile(epsilons, np.minimum.accumulate(deltas))


@lru_cache(maxsize=64)
def _profile(trials: Trials, number: Number) -> SelectionProfile:
    """Privacy profile of a selection."""
    return selection_profile(_trial_profile(trials), number)
