"""One canary and many runs: the Gaussian trade-off curve that the errors of a test refute.

After Nasr et al. 2023. docs/guarantees/audit-canaries.md.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from hush.accounting.pld import analytic_gaussian
from hush.audit.lower_bound import Array, clopper_pearson, epsilon_lower
from hush.core.errors import DataError
from hush.core.guarantee import DELTA

_FEWEST_RUNS = 8


@dataclass(frozen=True, kw_only=True)
class ManyRuns:
    """What the runs refute, with the confidence asked for."""

    epsilon: float
    """No (epsilon, delta) guarantee below this holds, whatever the mechanism."""
    separation: float
    """No Gaussian trade-off curve nearer than this holds."""
    gaussian_epsilon: float
    """Epsilon of that curve at delta: an estimate, unless the noise is normal and nothing is sampled."""


def many_runs(
    inside: npt.ArrayLike, outside: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> ManyRuns:
    """Lower bounds from the canary's score in each run with it and in each run without.

    The first half of the runs sets the threshold; the others are counted. Each epsilon and the
    separation hold with the confidence on their own.
    """
    DELTA["range"].check("delta", delta)
    scores = [np.asarray(values, dtype=np.float64) for values in (inside, outside)]
    if min(map(len, scores)) < _FEWEST_RUNS:
        raise DataError(
            f"{len(scores[0])} runs with the canary and {len(scores[1])} without: half of them find a "
            f"threshold and so few of the others refute nothing. Pass at least {_FEWEST_RUNS} of each."
        )
    (first, present), (first_outside, absent) = (np.split(x, [len(x) // 2]) for x in scores)
    threshold = best_threshold(first, first_outside)
    counts = (
        *(int((present > threshold).sum()), len(present)),
        *(int((absent > threshold).sum()), len(absent)),
    )
    separation = separation_lower(*counts, confidence)
    return ManyRuns(
        epsilon=epsilon_lower(*counts, delta, confidence),
        separation=separation,
        gaussian_epsilon=analytic_gaussian.epsilon(separation, delta).lower,
    )


def separation_lower(
    true_positives: int, positives: int, false_positives: int, negatives: int, confidence: float
) -> float:
    """Lower bound on the separation of two unit normals that allows such a test, with that confidence.

    The largest true positive rate at false positive rate x is Phi(Phi^-1(x) + separation).
    """
    true_rate, _ = clopper_pearson(true_positives, positives, confidence)
    _, false_rate = clopper_pearson(false_positives, negatives, confidence)
    if true_rate == 0 or false_rate == 1:
        return 0.0
    return max(0.0, float(ndtri(true_rate) - ndtri(false_rate)))


def roc_curve(members: Array, others: Array) -> tuple[Array, Array]:
    """False and true positive rates, from (0, 0) to (1, 1), one point a distinct score."""
    for name, scores in (("members", members), ("others", others)):
        if scores.ndim != 1 or not len(scores) or np.isnan(scores).any():
            raise DataError(
                f"the scores of the {name} must be a list of numbers with something in it: a record "
                "without a score can be called neither a member nor none."
            )
    scores = np.concatenate([members, others])
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(scores) - 1)
    hits = np.cumsum(order < len(members))[last]
    accused = last + 1 - hits
    return (
        np.concatenate([[0.0], accused / len(others)]),
        np.concatenate([[0.0], hits / len(members)]),
    )


def best_threshold(members: Array, others: Array) -> float:
    """Threshold at which true positive exceed false positive rates most; for other scores than these."""
    false, true = roc_curve(members, others)
    place = int(np.argmax(true - false))
    scores = -np.unique(-np.concatenate([members, others]))
    below = scores[place] if place < len(scores) else scores[-1] - 1.0
    above = scores[place - 1] if place else scores[0] + 1.0
    return float((above + below) / 2)
