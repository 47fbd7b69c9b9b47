"""Bounds on membership inference attacks (f-DP), and risk limits for calibration."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np

from hush.accounting.epsilon import Dimension, deltas, upper_epsilon
from hush.accounting.numerics import UNIT, Array, bisect
from hush.core.errors import InvalidValue, short_repr
from hush.core.guarantee import RECORD, Adjacency, Budget
from hush.core.plan import Plan
from hush.core.value import Range, Value, check_kind, with_article

_CHANCE = Range(at_least=0, at_most=1, why="it is a probability", example=0.01)
_PRIOR = Range(
    above=0, below=1, why="with prior 0 or 1 the attacker already knows the answer", example=0.5
)
# The search ends at the epsilon for delta = max(_SHARE * fpr * advantage, _MIN_DELTA), because larger
# epsilons hardly improve the bound.
_SHARE, _MIN_DELTA = 1e-3, 1e-12
# Above this epsilon the bound is trivial.
_MAX_EPSILON = 700.0
# Size of the first grid of epsilons, size of each finer grid around the best epsilon, minimum number of
# finer grids, and final spacing.
_POINTS, _FINER_POINTS, _FINER_GRIDS, _CLOSE = 33, 9, 2, 1e-2
# Bound on the rounding error of a few operations on numbers up to 1.
_ROUNDING = 32 * UNIT


class AttackBounds(ABC):
    """Bounds on hypothesis tests between two neighbouring data sets, from a privacy profile.

    **Guarantee.** No membership test exceeds these bounds, which are derived from upper bounds on delta:
    docs/guarantees/attacker.md.
    """

    @abstractmethod
    def _deltas(self, epsilons: Sequence[float]) -> Array:
        """Upper bounds on delta at increasing epsilons."""

    @abstractmethod
    def _epsilon(self, delta: float) -> float:
        """Upper bound on epsilon at delta."""

    @cached_property
    def advantage(self) -> float:
        """Membership advantage: upper bound on the true positive rate minus the false positive rate.

        It equals the total variation distance, which is delta at epsilon 0.
        """
        return float(self._deltas([0.0])[0])

    @property
    def success(self) -> float:
        """Largest accuracy of a membership test at even prior odds."""
        return (1 + self.advantage) / 2

    def posterior(self, prior: float) -> float:
        """Upper bound on the accuracy of a membership guess after the releases (1 - Bayes risk).

        It is m + (1 - m) delta(log(m / (1 - m))) with m = max(prior, 1 - prior).
        """
        checked = _PRIOR.check("prior", prior)
        m = max(checked, 1 - checked)
        # rounded down, because delta decreases in epsilon
        log_odds = max(0.0, math.log(m / (1 - m)) * (1 - _ROUNDING) - _ROUNDING)
        return min(1.0, m + (1 - m) * float(self._deltas([log_odds])[0]) + _ROUNDING)

    def true_positive_rate(self, false_positive_rate: float) -> float:
        """Upper bound on the true positive rate (power) of every test at this false positive rate."""
        return min(1.0, 1 - self.false_negative_rate(false_positive_rate) + UNIT)

    def false_negative_rate(self, false_positive_rate: float) -> float:
        """Trade-off curve f: the smallest false negative rate of a test at this false positive rate.

        f(x) is the largest of 1 - delta - exp(epsilon) x and exp(-epsilon) (1 - delta - x) over all
        epsilon. Every epsilon gives a valid bound, so an imperfect search is sound.
        """
        x = _CHANCE.check("false_positive_rate", false_positive_rate)
        smallest = max(_MIN_DELTA, _SHARE * x * self.advantage)
        epsilons = np.linspace(0.0, min(self._epsilon(smallest), _MAX_EPSILON), _POINTS)
        deltas, best = self._deltas(epsilons.tolist()), 0.0
        for grid in count():
            steep = 1 - deltas - np.exp(epsilons) * x
            flat = np.exp(-epsilons) * (1 - deltas - x)
            best = max(best, float(np.maximum(steep, flat).max()))
            if grid >= _FINER_GRIDS and epsilons[1] - epsilons[0] <= _CLOSE * (1 + epsilons[0]):
                break
            # each is concave in exp(epsilon) or exp(-epsilon), so it has one peak
            peak = int(np.argmax(np.maximum(steep, flat)))
            near = epsilons[max(peak - 1, 0)], epsilons[min(peak + 1, len(epsilons) - 1)]
            epsilons = np.linspace(*near, _FINER_POINTS)
            deltas = self._deltas(epsilons.tolist())
        return max(0.0, best - _ROUNDING)


@dataclass(frozen=True)
class Attacker(AttackBounds):
    """Bounds on hypothesis tests between two neighbouring data sets, for a composition of plans.

    Args:
        counts: Number of steps of each plan.
        dimension: Number of parameters, if the privacy cost depends on it.
        adjacency: Adjacency of the two data sets; by default one record (zero-out).

    >>> import hush
    >>> plan = hush.plans.dpsgd(rate=0.01, multiplier=1.0)
    >>> print(Attacker({plan: 1000}))
    an attacker who guesses whether a record took part, at even odds, is right at most 58.1% of the time
    """

    counts: Mapping[Plan, int]
    dimension: Dimension = None
    adjacency: Adjacency = RECORD

    def __post_init__(self) -> None:
        check_kind("adjacency", self.adjacency, Adjacency)

    def _deltas(self, epsilons: Sequence[float]) -> Array:
        bounds = deltas(self.counts, epsilons, self.dimension, self.adjacency)
        return np.array([bound.upper for bound in bounds])

    def _epsilon(self, delta: float) -> float:
        return upper_epsilon(self.counts, delta, self.dimension, self.adjacency)

    def __str__(self) -> str:
        return (
            f"an attacker who guesses {membership(self.adjacency)}, at even odds, is right at most "
            f"{math.ceil(1000 * self.success) / 10:.1f}% of the time"
        )


def membership(adjacency: Adjacency) -> str:
    """Hypothesis of a membership test in words, e.g. "whether a record took part"."""
    who = "user" if adjacency.per_unit else "record"
    if adjacency.group > 1:
        together = ", or others," * adjacency.replaced
        return f"whether {adjacency.group} {who}s together{together} took part"
    return f"which of two {who}s took part" if adjacency.replaced else f"whether a {who} took part"


@dataclass(frozen=True)
class ApproximateDP(AttackBounds):
    """Attack bounds that follow from (epsilon, delta) pairs alone, for every mechanism.

    Args:
        points: (epsilon, delta) pairs that the same mechanism satisfies.

    >>> bounds = ApproximateDP([(3.0, 1e-5)])
    >>> print(f"{bounds.advantage:.3f}", f"{bounds.true_positive_rate(0.01):.3f}")
    0.905 0.201
    """

    points: Sequence[tuple[float, float]]

    def _deltas(self, epsilons: Sequence[float]) -> Array:
        # The least private mechanism for each point has tests with errors 0 and 1 - delta, tests with
        # equal errors, and their mixtures (Kairouz, Oh and Viswanath 2015). The smallest of these
        # profiles is a bound.
        known, deltas = np.array(sorted(self.points), dtype=float).T
        deltas = np.where(known > _MAX_EPSILON, 1.0, deltas)  # such points give no bound
        known = np.minimum(known, _MAX_EPSILON)
        even = (1 - deltas) / (1 + np.exp(known))
        worst = 1 - (1 + np.exp(np.minimum(epsilons, known[:, None]))) * even[:, None]
        smallest = np.maximum(worst, deltas[:, None]).min(axis=0)
        # delta is convex in exp(epsilon), so chords are upper bounds
        between = np.interp(np.exp(epsilons), np.exp(known), deltas, left=1.0)
        return np.asarray(np.minimum(np.minimum(smallest, between) + _ROUNDING, 1.0))

    def _epsilon(self, delta: float) -> float:
        largest = max(epsilon for epsilon, _ in self.points)
        return min((epsilon for epsilon, held in self.points if held <= delta), default=largest)


_LIMIT = Range(
    above=0, below=1, why="it is a probability: 0 is unattainable, and 1 is no limit", example=0.05
)
_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Risk(Value):
    """Limit on the success of every membership attack on a release.

    Pass one of three limits: `tpr` with `fpr`, `advantage`, or `posterior` with `prior`.

    Args:
        tpr: Largest true positive rate of a test with false positive rate `fpr`. It also bounds the
            success rate of attribute inference and reconstruction attacks, if `fpr` is their success
            rate without the release.
        fpr: False positive rate of the test.
        advantage: Largest membership advantage: true positive rate minus false positive rate.
        posterior: Largest accuracy of a membership guess.
        prior: Prior probability of membership.

    **Guarantee.** A plan calibrated to the limit satisfies it, for the adjacency of the calibration:
    docs/guarantees/risk.md.

    >>> import hush
    >>> plan = hush.plans.dpsgd(rate=0.01, multiplier=1.0)
    >>> private = hush.calibrate(plan, hush.Risk(tpr=0.05, fpr=0.01), steps=1000)
    >>> 0.0499 <= hush.Attacker({private: 1000}).true_positive_rate(0.01) <= 0.05
    True
    """

    tpr: float | None = None
    fpr: float | None = None
    advantage: float | None = None
    posterior: float | None = None
    prior: float | None = None

    def __post_init__(self) -> None:
        passed = self.to_plain()
        if passed.keys() not in ({"tpr", "fpr"}, {"advantage"}, {"posterior", "prior"}):
            names = ", ".join(passed) or "nothing"
            raise InvalidValue(
                f"a risk is tpr with fpr, advantage, or posterior with prior, but {names} was passed. "
                "Pass e.g. tpr=0.05, fpr=0.01."
            )
        for name, value in passed.items():
            object.__setattr__(self, name, _LIMIT.check(name, value))
        if self.max_gain <= 0:
            limit, known = ("tpr", "fpr") if self.tpr is not None else ("posterior", "prior")
            raise InvalidValue(
                f"{limit}={short_repr(passed[limit])} must be above {self._baseline:g} at {known}="
                f"{short_repr(passed[known])}: a guess without the release already has this success "
                f"rate. Pass e.g. {limit}={(1 + 3 * self._baseline) / 4:.3g}.",
                key=limit,
            )

    @property
    def _baseline(self) -> float:
        """Success of a blind guess, without the release."""
        if self.fpr is not None:
            return self.fpr
        return 0.0 if self.prior is None else max(self.prior, 1 - self.prior)

    @property
    def max_gain(self) -> float:
        """Limit on the gain of an attack over a blind guess."""
        return (self.tpr or self.advantage or self.posterior or 0.0) - self._baseline

    def attained(self, attack: AttackBounds) -> float:
        """Upper bound on the quantity that this risk limits: a rate, advantage or posterior.

        Args:
            attack: Bounds on every test of the releases.
        """
        if self.fpr is not None:
            return attack.true_positive_rate(self.fpr)
        return attack.advantage if self.prior is None else attack.posterior(self.prior)

    def gain(self, attack: AttackBounds) -> float:
        """Upper bound on the gain of an attack over a blind guess.

        Args:
            attack: Bounds on every test of the releases.
        """
        return max(0.0, self.attained(attack) - self._baseline)

    def budget(self, delta: float) -> Budget:
        """Budget with the largest epsilon at `delta` that implies this limit for every mechanism.

        Args:
            delta: Delta of the budget.
        """

        def kept(epsilon: float) -> bool:
            return self.gain(ApproximateDP([(epsilon, delta)])) <= self.max_gain

        smallest = 1e-9
        if not kept(smallest):
            raise InvalidValue(
                f"delta={delta:g} must be below {self.max_gain:.3g} for {self}: the guarantee may fail "
                "with probability delta. Pass a smaller delta.",
                key="delta",
            )
        return Budget(epsilon=bisect(kept, smallest, _MAX_EPSILON, tolerance=_TOLERANCE)[0], delta=delta)

    def __str__(self) -> str:
        if self.fpr is not None:
            return f"a true positive rate of {self.tpr:g} at {self.fpr:g} false positives"
        if self.prior is None:
            return f"an advantage of {self.advantage:g}"
        return f"a posterior of {self.posterior:g} from a prior of {self.prior:g}"


Limit = Budget | Risk
"""Constraint for a calibration."""


def allowance(limit: object) -> float:
    """Largest cost that a limit allows: epsilon, or the gain of an attack."""
    if isinstance(limit, Budget):
        return limit.epsilon
    if isinstance(limit, Risk):
        return limit.max_gain
    text = short_repr(limit) if isinstance(limit, str | float | int | None) else "..."
    raise InvalidValue(
        f"budget={text} must be a Budget or a Risk, not {with_article(type(limit).__name__)}. Pass "
        "e.g. hush.Budget(epsilon=3.0, delta=1e-5), or hush.Risk(tpr=0.05, fpr=0.01).",
        key="budget",
    )


def stated(limit: Limit) -> str:
    """Description of a limit in words."""
    words = "epsilon={limit.epsilon:g} at delta={limit.delta:g}"
    return str(limit) if isinstance(limit, Risk) else words.format(limit=limit)
