"""Lower bounds on epsilon from the counts of a test's errors, and from scores of runs."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv

from hush.core.errors import InvalidValue
from hush.core.guarantee import DELTA
from hush.core.value import Range, check_count

Array = npt.NDArray[np.float64]
CONFIDENCE = Range(
    above=0,
    below=1,
    why="it is the chance that the interval holds, and no count of chance events makes one certain",
    example=0.95,
)
_WHY = "trials are counted one by one"
# betaincinv is right to about 1e-14; the ends are moved outwards by more.
_OUTWARD = 1e-12
_THRESHOLDS = 128
_TREES = 40


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Clopper-Pearson interval of a success probability, each end missed with (1 - confidence) / 2.

    **Guarantee.** Whatever the chance, both ends are right with probability `confidence` at least, if
    the trials are independent and `trials` was fixed before they were made: docs/guarantees/audit.md.

    >>> low, high = clopper_pearson(0, 100, 0.95)
    >>> low, round(high, 6)
    (0.0, 0.036217)
    """
    trials = check_count("trials", trials, _WHY, at_least=1)
    successes = check_count("successes", successes, _WHY)
    if successes > trials:
        raise InvalidValue(
            f"successes={successes} must be at most trials={trials}: each trial succeeds once or not.",
            key="successes",
        )
    beyond = (1 - CONFIDENCE.check("confidence", confidence)) / 2
    failures = trials - successes
    low = 0.0 if successes == 0 else float(betaincinv(successes, failures + 1, beyond))
    high = 1.0 if failures == 0 else 1 - float(betaincinv(failures, successes + 1, beyond))
    return max(0.0, low * (1 - _OUTWARD)), min(1.0, high * (1 + _OUTWARD) + float(np.finfo(float).eps))


def epsilon_lower(
    true_positives: int,
    positives: int,
    false_positives: int,
    negatives: int,
    delta: float,
    confidence: float,
) -> float:
    """Lower bound on epsilon at `delta` from the errors of a distinguishing test.

    Of `positives` runs with the record `true_positives` were called so, and of `negatives` runs without
    it `false_positives`. With probability `confidence` no guarantee of a smaller epsilon holds.

    **Guarantee.** docs/guarantees/audit.md: both directions follow from the same two one-sided
    intervals, so `1 - confidence` is split in two and not in four. The test must have been chosen
    without these runs.

    >>> round(epsilon_lower(900, 1000, 100, 1000, 1e-5, 0.95), 3)
    1.99
    """
    delta = DELTA["range"].check("delta", delta)
    hit, _ = clopper_pearson(true_positives, positives, confidence)
    _, wrong = clopper_pearson(false_positives, negatives, confidence)
    return max(0.0, _log_ratio(hit - delta, wrong), _log_ratio(1 - wrong - delta, 1 - hit))


def _log_ratio(above: float, below: float) -> float:
    """The logarithm of the ratio, 0 where there is nothing above."""
    return math.log(above / below) if above > 0 else 0.0


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
