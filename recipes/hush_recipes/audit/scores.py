"""Lower bounds on epsilon from scores of runs with a record and without it, beside the charge."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hush.audit.lower_bound import Array, epsilon_lower
from hush.core.errors import InvalidValue

_THRESHOLDS = 128
_TREES = 40


@dataclass(frozen=True, kw_only=True)
class Draws:
    """Releases, or scores of them, with the record and without it: a row for each independent run."""

    present: Array
    absent: Array


@dataclass(frozen=True, kw_only=True)
class Audit:
    """Lower bound on epsilon by an attack, beside the charge.

    With probability `confidence` no epsilon below `lower` holds at `delta`; `charge` is promised. A
    lower bound above the charge refutes the guarantee; one below it proves nothing.
    """

    lower: float
    charge: float
    delta: float
    confidence: float
    runs: int
    """How many runs were counted, with the record and as many without."""

    @classmethod
    def of(cls, scores: Draws, charge: float, delta: float, confidence: float) -> "Audit":
        """The audit of a charge by scores of runs, half of which are counted."""
        lower = epsilon_lower_bound(scores, delta, confidence)
        counted = len(scores.present) // 2
        return cls(lower=lower, charge=charge, delta=delta, confidence=confidence, runs=counted)

    @property
    def holds(self) -> bool:
        """Whether the charge was not refuted."""
        return self.lower <= self.charge

    @property
    def tightness(self) -> float:
        """Share of the charge that the attack reaches."""
        return self.lower / self.charge


def epsilon_lower_bound(scores: Draws, delta: float, confidence: float) -> float:
    """Lower bound on epsilon from a score of each run, large with the record.

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
    places = np.unique(np.linspace(0, len(pooled) - 1, _THRESHOLDS).astype(int))

    def bound(runs: tuple[Array, Array], threshold: float) -> float:
        hits, wrong = (int((part >= threshold).sum()) for part in runs)
        return epsilon_lower(hits, len(runs[0]), wrong, len(runs[1]), delta, confidence)

    best = max(pooled[places], key=lambda threshold: bound(chosen, float(threshold)))
    return bound(counted, float(best))


def by_trees(outputs: Draws) -> Draws:
    """Scores of a classifier that has learnt every other run, for outputs whose law is not known."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    model = HistGradientBoostingClassifier(max_iter=_TREES, max_leaf_nodes=8, random_state=0)
    model.fit(*_every_other(outputs))
    return Draws(
        present=model.predict_proba(outputs.present)[:, 1],
        absent=model.predict_proba(outputs.absent)[:, 1],
    )


def by_line(outputs: Draws) -> Draws:
    """Scores of a logistic regression on every other run, for outputs that are moved along a line."""
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression().fit(*_every_other(outputs))
    return Draws(
        present=model.decision_function(outputs.present),
        absent=model.decision_function(outputs.absent),
    )


def _every_other(outputs: Draws) -> tuple[Array, npt.NDArray[np.int_]]:
    """Every other run, which chooses the test, with labels: 1 with the record."""
    present, absent = outputs.present[::2], outputs.absent[::2]
    return np.concatenate([present, absent]), np.repeat([1, 0], [len(present), len(absent)])
