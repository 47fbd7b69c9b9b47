"""The trade-off curve (f-DP) of a composition: bounds on every membership test of one record or a group.

The attacker sees everything released and tests which of two neighbouring data sets it came from.
`Attacker` bounds the two error rates of every such test, from the curve that epsilon is read off.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hush.accounting.epsilon import Dimension, compose, delta
from hush.core.guarantee import RECORD, Adjacency
from hush.core.plan import Plan
from hush.core.ranges import Range, check_kind

_CHANCE = Range(at_least=0, at_most=1, why="it is a probability", example=0.01)
# The search looks at epsilons up to the one at this delta, beyond which nothing is to be gained.
_MIN_DELTA = 1e-12
# Any epsilon gives a bound; beyond this one no error rate is left to tell.
_MAX_EPSILON = 700.0
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Attacker:
    """Bounds on the hypothesis test between two neighbouring data sets.

    Args:
        counts: Number of steps of each plan.
        dimension: Number of parameters, where the charge depends on it.
        adjacency: What the two data sets differ in: one record's slot, unless it says otherwise.

    **Guarantee.** No membership test does better than any of the numbers here: they are made from
    upper bounds on delta, and the trade-off curve is equivalent to the privacy curve (Wasserman and
    Zhou 2010; Dong, Roth and Su 2022). docs/guarantees/attacker.md.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Poisson(rate=0.01),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=1.0),
    ... )
    >>> print(Attacker({plan: 1000}))
    an attacker who guesses whether a record took part, at even odds, is right at most 58.1% of the time
    """

    counts: Mapping[Plan, int]
    dimension: Dimension = None
    adjacency: Adjacency = RECORD

    def __post_init__(self) -> None:
        check_kind("adjacency", self.adjacency, Adjacency)

    @cached_property
    def advantage(self) -> float:
        """Membership advantage: the largest true positive rate less false positive rate.

        It is the total variation distance, delta at epsilon 0.
        """
        return delta(self.counts, 0.0, self.dimension, self.adjacency).upper

    @property
    def success(self) -> float:
        """The largest accuracy of a test at even prior odds."""
        return (1 + self.advantage) / 2

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """The largest power of a test at a false positive rate.

        Args:
            false_positive_rate: Chance that the test says "took part" of a record that did not.

        Returns:
            An upper bound on the chance that it says so of one that did.
        """
        return 1 - self.false_negative_rate(false_positive_rate)

    def false_negative_rate(self, false_positive_rate: float) -> float:
        """The trade-off curve f at this false positive rate: the least false negative rate of a test.

        f(x) is the largest of 1 - delta - exp(epsilon) x and exp(-epsilon) (1 - delta - x) over all
        epsilon; every epsilon alone is a valid bound, so an imperfect search is still sound.

        Args:
            false_positive_rate: Share of non-members that the test calls members (type I error).

        Returns:
            Lower bound on the share of members that it misses (type II error).
        """
        x = _CHANCE.check("false_positive_rate", false_positive_rate)

        highest = compose(self.counts, _MIN_DELTA, self.dimension, self.adjacency).epsilon.upper
        max_epsilon = min(highest, _MAX_EPSILON)

        def intercept(epsilon: float) -> float:
            return 1 - delta(self.counts, epsilon, self.dimension, self.adjacency).upper

        # Each has one peak: the first is concave in exp(epsilon), the second in exp(-epsilon).
        return max(
            0.0,
            _maximum(lambda epsilon: intercept(epsilon) - math.exp(epsilon) * x, max_epsilon),
            _maximum(lambda epsilon: math.exp(-epsilon) * (intercept(epsilon) - x), max_epsilon),
        )

    def __str__(self) -> str:
        replaced = self.adjacency.replaced
        who = "user" if self.adjacency.per_unit else "record"
        if self.adjacency.group > 1:
            units = f"whether {self.adjacency.group} {who}s together" + ", or others," * replaced
        else:
            units = f"which of two {who}s" if replaced else f"whether a {who}"
        return (
            f"an attacker who guesses {units} took part, at even odds, is right at most "
            f"{100 * self.success:.1f}% of the time"
        )


def _maximum(function: Callable[[float], float], end: float) -> float:
    """The largest evaluated value of a unimodal function on [0, end] (golden-section search)."""
    low, high = 0.0, end
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    best = max(function(low), function(high), at_left, at_right)
    while high - low > 1e-2 * (1 + low):
        if at_left >= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
        best = max(best, at_left, at_right)
    return best
