"""One canary and many runs: the Gaussian trade-off curve that the errors of a test refute.

After Nasr et al. 2023. docs/guarantees/audit-canaries.md.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import ndtri

from hush.accounting.pld import analytic_gaussian
from hush.audit.lower_bound import clopper_pearson, epsilon_lower
from hush.audit.roc import Roc
from hush.core.errors import DataError
from hush.core.guarantee import DELTA

_LEAST = 8


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

    The first half of the runs finds the threshold; the others are counted. Each epsilon and the
    separation hold with the confidence on their own.
    """
    DELTA["range"].check("delta", delta)
    scores = [np.asarray(values, dtype=np.float64) for values in (inside, outside)]
    if min(map(len, scores)) < _LEAST:
        raise DataError(
            f"{len(scores[0])} runs with the canary and {len(scores[1])} without: half of them find a "
            f"threshold and so few of the others refute nothing. Pass at least {_LEAST} of each."
        )
    (first, counted), (other, counted_other) = (np.split(x, [len(x) // 2]) for x in scores)
    threshold = Roc(first, other).best_threshold
    hits, wrong = int((counted > threshold).sum()), int((counted_other > threshold).sum())
    separation = separation_lower(hits, len(counted), wrong, len(counted_other), confidence)
    return ManyRuns(
        epsilon=epsilon_lower(hits, len(counted), wrong, len(counted_other), delta, confidence),
        separation=separation,
        gaussian_epsilon=analytic_gaussian.epsilon(separation, delta).lower,
    )


def separation_lower(
    true_positives: int, positives: int, false_positives: int, negatives: int, confidence: float
) -> float:
    """The separation of two unit normals below which no pair has such a test, with that confidence.

    The largest true positive rate at false positive rate x is Phi(Phi^-1(x) + separation).
    """
    least, _ = clopper_pearson(true_positives, positives, confidence)
    _, most = clopper_pearson(false_positives, negatives, confidence)
    if least == 0 or most == 1:
        return 0.0
    return max(0.0, float(ndtri(least) - ndtri(most)))
