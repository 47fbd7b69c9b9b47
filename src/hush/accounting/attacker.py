"""What an attacker can do at best: the guarantee as a trade-off between two kinds of error.

The attacker sees everything released and guesses whether one record took part. `Attacker` bounds
every such guess, from the same privacy curve that epsilon is read off.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from hush.accounting import epsilon as charge
from hush.core.plan import Plan
from hush.core.ranges import Range

_CHANCE = Range(at_least=0, at_most=1, why="it is a probability", example=0.01)
# The search looks at epsilons up to the one at this delta, beyond which nothing is to be gained.
_LEAST_DELTA = 1e-12
_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Attacker:
    """The best conceivable attack on a run, for neighbours that differ by one record.

    **Guarantee.** No attack does better than any of the numbers here: they are made from upper
    bounds on delta, and hypothesis testing is equivalent to the privacy curve (Wasserman and Zhou
    2010; Dong, Roth and Su 2022). docs/guarantees/attacker.md.

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
    dimension: charge.Dimension = None
    """The number of parameters, where the charge depends on it."""

    @cached_property
    def advantage(self) -> float:
        """The most by which true positives can exceed false positives: the total variation."""
        return charge.delta(self.counts, 0.0, self.dimension).upper

    @property
    def success(self) -> float:
        """How often a guess at even odds is right at most."""
        return (1 + self.advantage) / 2

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """How many members at most are found when so many others are accused."""
        return 1 - self.false_negative_rate(false_positive_rate)

    def false_negative_rate(self, false_positive_rate: float) -> float:
        """The trade-off curve (f-DP): how many members at least are missed.

        f(x) is the largest of 1 - delta - exp(epsilon) x and exp(-epsilon) (1 - delta - x) over all
        epsilon; every epsilon alone is a valid bound, so an imperfect search is still sound.
        """
        x = _CHANCE.check("false_positive_rate", false_positive_rate)

        highest = charge.compose(self.counts, _LEAST_DELTA, self.dimension).epsilon.upper

        def kept(epsilon: float) -> float:
            return 1 - charge.delta(self.counts, epsilon, self.dimension).upper

        # Each has one peak: the first is concave in exp(epsilon), the second in exp(-epsilon).
        return max(
            0.0,
            _largest(lambda epsilon: kept(epsilon) - math.exp(epsilon) * x, highest),
            _largest(lambda epsilon: math.exp(-epsilon) * (kept(epsilon) - x), highest),
        )

    def __str__(self) -> str:
        return (
            "an attacker who guesses whether a record took part, at even odds, is right at most "
            f"{100 * self.success:.1f}% of the time"
        )


def _largest(function: Callable[[float], float], highest: float) -> float:
    """The largest value found of a function of one peak on [0, highest] (golden section)."""
    low, high = 0.0, highest
    left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_left, at_right = function(left), function(right)
    found = max(function(low), function(high), at_left, at_right)
    while high - low > 1e-2 * (1 + low):
        if at_left >= at_right:
            high, right, at_right = right, left, at_left
            left = high - _GOLDEN * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + _GOLDEN * (high - low)
            at_right = function(right)
        found = max(found, at_left, at_right)
    return found
