"""Bounds on every membership test (f-DP): of a composition of plans, or of a bare (epsilon, delta).

The attacker sees everything released and tests which of two neighbouring data sets it came from.
`Attacker` bounds the two error rates of every such test, from the curve that epsilon is read off.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np

from hush.accounting.attacker.privacy_profile import upper_deltas
from hush.accounting.epsilon import Dimension, upper_epsilon
from hush.accounting.numerics import UNIT, Array
from hush.core.guarantee import RECORD, Adjacency
from hush.core.plan import Plan
from hush.core.value import Range, check_kind

_CHANCE = Range(at_least=0, at_most=1, why="it is a probability", example=0.01)
_PRIOR = Range(
    above=0, below=1, why="an attacker who is certain beforehand learns nothing more", example=0.5
)
# The search looks at epsilons up to the one at a delta of this share of the test's false positives and
# of the advantage, beyond which little is to be gained; but at no smaller delta than this.
_SHARE, _MIN_DELTA = 1e-3, 1e-12
# Any epsilon gives a bound; beyond this one no error rate is left to tell.
_MAX_EPSILON = 700.0
# Epsilons of the first look, and of each of the closer ones around the best: at least two, and more
# until the epsilons are this close to each other.
_POINTS, _CLOSER_POINTS, _CLOSER_LOOKS, _CLOSE = 33, 9, 2, 1e-2
# A few operations on numbers up to 1: outweighs their rounding.
_ROUNDING = 32 * UNIT


class AttackBounds(ABC):
    """Bounds on the hypothesis test between two neighbouring data sets, from a privacy profile.

    **Guarantee.** No membership test does better than any of the numbers here: they are made from
    upper bounds on delta, and the trade-off curve is equivalent to the privacy profile (Wasserman and
    Zhou 2010; Dong, Roth and Su 2022). docs/guarantees/attacker.md.
    """

    @abstractmethod
    def _deltas(self, epsilons: Sequence[float]) -> Array:
        """Upper bounds on delta at increasing epsilons."""

    @abstractmethod
    def _epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at delta."""

    @cached_property
    def advantage(self) -> float:
        """Membership advantage: the largest true positive rate less false positive rate.

        It is the total variation distance, delta at epsilon 0.
        """
        return float(self._deltas([0.0])[0])

    @property
    def success(self) -> float:
        """The largest accuracy of a test at even prior odds."""
        return (1 + self.advantage) / 2

    def posterior(self, prior: float) -> float:
        """The largest chance that a guess of membership is right, after what was released is seen.

        It is the mean of the posterior probability of the likelier case (1 less the Bayes risk):
        m + (1 - m) delta(log(m / (1 - m))), where m = max(prior, 1 - prior) is that chance beforehand.

        Args:
            prior: Probability of membership before anything is released.

        Returns:
            An upper bound on the accuracy of the best guess; `success` at a prior of 1/2.
        """
        return self.posteriors([prior])[0]

    def posteriors(self, priors: Sequence[float]) -> list[float]:
        """`posterior` of each prior, from one composition: much cheaper than one by one.

        Args:
            priors: Probabilities of membership before anything is released.
        """
        likelier = [max(p, 1 - p) for p in (_PRIOR.check("prior", prior) for prior in priors)]
        # rounded down: delta falls with epsilon
        log_odds = [max(0.0, math.log(m / (1 - m)) * (1 - _ROUNDING) - _ROUNDING) for m in likelier]
        increasing = sorted(set(log_odds))
        deltas = dict(zip(increasing, self._deltas(increasing).tolist(), strict=True))
        gains = [(1 - m) * deltas[odds] for m, odds in zip(likelier, log_odds, strict=True)]
        return [min(1.0, m + gain + _ROUNDING) for m, gain in zip(likelier, gains, strict=True)]

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """The largest power of a test at a false positive rate.

        Args:
            false_positive_rate: Chance that the test says "took part" of a record that did not.

        Returns:
            An upper bound on the chance that it says so of one that did.
        """
        return min(1.0, 1 - self.false_negative_rate(false_positive_rate) + UNIT)

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
        smallest = max(_MIN_DELTA, _SHARE * x * self.advantage)
        epsilons = np.linspace(0.0, min(self._epsilon(smallest), _MAX_EPSILON), _POINTS)
        deltas, best = self._deltas(epsilons.tolist()), 0.0
        for look in count():
            steep = 1 - deltas - np.exp(epsilons) * x
            flat = np.exp(-epsilons) * (1 - deltas - x)
            best = max(best, float(np.maximum(steep, flat).max()))
            if look >= _CLOSER_LOOKS and epsilons[1] - epsilons[0] <= _CLOSE * (1 + epsilons[0]):
                break
            # one peak in both, which are concave in the slope, exp(epsilon) or exp(-epsilon)
            peak = int(np.argmax(np.maximum(steep, flat)))
            near = epsilons[max(peak - 1, 0)], epsilons[min(peak + 1, len(epsilons) - 1)]
            epsilons = np.linspace(*near, _CLOSER_POINTS)
            deltas = self._deltas(epsilons.tolist())
        return max(0.0, best - _ROUNDING)


@dataclass(frozen=True)
class Attacker(AttackBounds):
    """Bounds on the hypothesis test between two neighbouring data sets, of a composition of plans.

    Args:
        counts: Number of steps of each plan.
        dimension: Number of parameters, where the charge depends on it.
        adjacency: What the two data sets differ in: one record's slot, unless it says otherwise.

    **Guarantee.** No membership test does better than any of the numbers here:
    docs/guarantees/attacker.md.

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

    def _deltas(self, epsilons: Sequence[float]) -> Array:
        return np.array(upper_deltas(self.counts, epsilons, self.dimension, self.adjacency))

    def _epsilon(self, delta: float) -> float:
        return upper_epsilon(self.counts, delta, self.dimension, self.adjacency)

    def __str__(self) -> str:
        return (
            f"an attacker who guesses {membership(self.adjacency)}, at even odds, is right at most "
            f"{100 * self.success:.1f}% of the time"
        )


def membership(adjacency: Adjacency) -> str:
    """What a membership test is to find out, in words: "whether a record took part"."""
    who = "user" if adjacency.per_unit else "record"
    if adjacency.group > 1:
        together = ", or others," * adjacency.replaced
        return f"whether {adjacency.group} {who}s together{together} took part"
    return f"which of two {who}s took part" if adjacency.replaced else f"whether a {who} took part"


@dataclass(frozen=True)
class ApproximateDP(AttackBounds):
    """Bounds on the hypothesis test that follow from pairs of epsilon and delta, whatever the mechanism.

    Args:
        points: Pairs of epsilon and delta that hold, all of them of one mechanism.

    >>> bounds = ApproximateDP([(3.0, 1e-5)])
    >>> print(f"{bounds.advantage:.3f}", f"{bounds.true_positive_rate(0.01):.3f}")
    0.905 0.201
    """

    points: Sequence[tuple[float, float]]

    def _deltas(self, epsilons: Sequence[float]) -> Array:
        # The profile of the least private mechanism: its tests have errors 0 and 1 - delta, or both
        # alike, or a mixture (Kairouz, Oh and Viswanath 2015). Each point has one; the smallest holds.
        known, deltas = np.array(sorted(self.points), dtype=float).T
        deltas = np.where(known > _MAX_EPSILON, 1.0, deltas)  # such a point says nothing
        known = np.minimum(known, _MAX_EPSILON)
        even = (1 - deltas) / (1 + np.exp(known))
        worst = 1 - (1 + np.exp(np.minimum(epsilons, known[:, None]))) * even[:, None]
        smallest = np.maximum(worst, deltas[:, None]).min(axis=0)
        # delta is convex in exp(epsilon): no larger than on the line between two points
        between = np.interp(np.exp(epsilons), np.exp(known), deltas, left=1.0)
        rounded: Array = np.minimum(np.minimum(smallest, between) + _ROUNDING, 1.0)
        return rounded

    def _epsilon(self, delta: float) -> float:
        largest = max(epsilon for epsilon, _ in self.points)
        return min((epsilon for epsilon, held in self.points if held <= delta), default=largest)
