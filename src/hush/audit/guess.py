"""Telling two sets of outputs apart: a score, a threshold from one half, counts from the other."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hush.audit.interval import epsilon_lower
from hush.core.errors import InvalidValue

Array = npt.NDArray[np.float64]
_CANDIDATES = 128
_TREES = 40


@dataclass(frozen=True, kw_only=True)
class Draws:
    """What was released with the record and without it: a row for each independent run."""

    present: Array
    absent: Array


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an attack found of a guarantee.

    With probability `confidence` no epsilon below `lower` holds at `delta`; `charge` is promised. A
    lower bound above the charge refutes the guarantee; one below it proves nothing.
    """

    lower: float
    charge: float
    delta: float
    confidence: float
    runs: int
    """How many runs were counted, with the record and as many without."""

    @property
    def holds(self) -> bool:
        """Whether the charge was not refuted."""
        return self.lower <= self.charge

    @property
    def tightness(self) -> float:
        """How much of the charge the attack found."""
        return self.lower / self.charge


def refuted(scores: Draws, delta: float, confidence: float) -> float:
    """The epsilon below which nothing holds, from a score of each run: large with the record.

    The threshold is chosen on every other run, and the runs between are counted.
    """
    chosen = (scores.present[::2], scores.absent[::2])
    counted = (scores.present[1::2], scores.absent[1::2])
    if min(map(len, counted)) == 0:
        raise InvalidValue(
            f"{len(scores.present)} and {len(scores.absent)} runs are too few: one half of them chooses "
            "the test and the other is counted. Pass at least two of each."
        )
    pooled = np.unique(np.concatenate(chosen))
    places = np.unique(np.linspace(0, len(pooled) - 1, _CANDIDATES).astype(int))

    def bound(runs: tuple[Array, Array], threshold: float) -> float:
        hits, wrong = (int((part >= threshold).sum()) for part in runs)
        return epsilon_lower(hits, len(runs[0]), wrong, len(runs[1]), delta, confidence)

    best = max(pooled[places], key=lambda threshold: bound(chosen, float(threshold)))
    return bound(counted, float(best))


def by_trees(outputs: Draws) -> Draws:
    """Scores of a classifier that has learnt every other run, for outputs whose law is not known."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    rows = np.concatenate([outputs.present[::2], outputs.absent[::2]])
    labels = np.repeat([1, 0], [len(outputs.present[::2]), len(outputs.absent[::2])])
    model = HistGradientBoostingClassifier(max_iter=_TREES, max_leaf_nodes=8, random_state=0)
    model.fit(rows, labels)
    return Draws(
        present=model.predict_proba(outputs.present)[:, 1],
        absent=model.predict_proba(outputs.absent)[:, 1],
    )


def by_line(outputs: Draws) -> Draws:
    """Scores of a logistic regression on every other run, for outputs that are moved along a line."""
    from sklearn.linear_model import LogisticRegression

    rows = np.concatenate([outputs.present[::2], outputs.absent[::2]])
    labels = np.repeat([1, 0], [len(outputs.present[::2]), len(outputs.absent[::2])])
    model = LogisticRegression().fit(rows, labels)
    return Draws(
        present=model.decision_function(outputs.present),
        absent=model.decision_function(outputs.absent),
    )


def by_frequency(outcomes: Draws) -> Draws:
    """Scores of outcomes that are few: how much more frequent each is with the record."""
    kinds, numbers = np.unique(np.concatenate([outcomes.present, outcomes.absent]), return_inverse=True)
    present, absent = np.split(numbers, [len(outcomes.present)])
    with_record, without = (np.bincount(part[::2], minlength=len(kinds)) for part in (present, absent))
    scores = np.log((with_record + 0.5) / (without + 0.5))
    return Draws(present=scores[present], absent=scores[absent])
