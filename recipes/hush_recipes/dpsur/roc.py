"""ROC curve of an attack, its area and rates with intervals, and the ceiling that a guarantee sets."""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hush.audit.lower_bound import Array, best_threshold, clopper_pearson, roc_curve
from hush.core.errors import DataError
from hush.core.guarantee import DELTA
from hush.core.value import Range

_FALSE = Range(at_least=0, at_most=1, why="it is the share of others that are accused", example=0.01)
_EPSILON = Range(at_least=0, why="a privacy loss below zero is none", example=1.0)


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A measured rate with its Clopper-Pearson interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


@dataclass(frozen=True, eq=False)
class Roc:
    """ROC curve of the scores of members and of others."""

    members: Array
    others: Array
    rates: tuple[Array, Array] = field(init=False)
    """False and true positive rates, from (0, 0) to (1, 1), one point a distinct score."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", roc_curve(self.members, self.others))

    @property
    def auc(self) -> float:
        """Area under the curve: how often a member scores above another, ties counting half."""
        false, true = self.rates
        return float(np.sum(np.diff(false) * (true[1:] + true[:-1])) / 2)

    @property
    def best_threshold(self) -> float:
        """The threshold of the largest difference of the rates; for other scores than these."""
        return best_threshold(self.members, self.others)

    def at(self, false_positive_rate: float, confidence: float = 0.95) -> Estimate:
        """The largest true positive rate at which no larger share of the others is accused.

        The interval is of the true positive rate at that threshold; the others that set it are taken as
        they are.
        """
        limit = _FALSE.check("false_positive_rate", false_positive_rate)
        false, true = self.rates
        value = float(true[false <= limit].max())
        low, high = clopper_pearson(round(value * len(self.members)), len(self.members), confidence)
        return Estimate(value=value, low=low, high=high)

    def accuracy(self, threshold: float, confidence: float = 0.95) -> Estimate:
        """How often members lie above the threshold and others do not, at even odds.

        The threshold must have been chosen without these records. With one that is their own median the
        interval is right for many records, and for few it misses a little more often than it says.
        There must be as many members as others. The right guesses are then a sum of independent coins
        with two chances, whose tails are no heavier than those of equal coins (Hoeffding 1956): one
        interval of Clopper and Pearson holds for both. It is over the records, for the model at hand.
        """
        if len(self.members) != len(self.others):
            raise DataError(
                f"{len(self.members)} members and {len(self.others)} others: accuracy at even odds is "
                "counted over as many of each. Leave some out."
            )
        right = int((self.members > threshold).sum() + (self.others <= threshold).sum())
        trials = len(self.members) + len(self.others)
        low, high = clopper_pearson(right, trials, confidence)
        return Estimate(value=right / trials, low=low, high=high)


def ceiling(false_positive_rate: npt.ArrayLike, epsilon: float, delta: float) -> Array:
    """The largest true positive rate that (epsilon, delta) allows any attack at a false positive rate.

    The smaller of exp(epsilon) x + delta and 1 - exp(-epsilon) (1 - delta - x): one for each direction
    of adding and removing the record. docs/guarantees/attacker.md.

    >>> ceiling([0.0, 0.01], epsilon=1.0, delta=1e-5).round(5).tolist()
    [1e-05, 0.02719]
    """
    _EPSILON.check("epsilon", epsilon)
    DELTA["range"].check("delta", delta)
    false = np.asarray(false_positive_rate, dtype=np.float64)
    for rate in (false.min(), false.max()):
        _FALSE.check("false_positive_rate", float(rate))
    with np.errstate(over="ignore"):
        up = np.exp(epsilon) * false + delta
    down = 1 - np.exp(-epsilon) * (1 - delta - false)
    return np.asarray(np.minimum(np.minimum(up, down), 1.0))
