"""Risk: a limit on what a membership attack achieves, in place of an epsilon at a delta."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from hush.accounting.attacker.attacker import ApproximateDP, AttackBounds, Attacker
from hush.accounting.epsilon import Dimension, upper_epsilon
from hush.accounting.numerics import bisect
from hush.core.errors import InvalidValue, short_repr
from hush.core.guarantee import RECORD, Adjacency, Budget
from hush.core.plan import Plan
from hush.core.value import Range, Value, with_article

_CHANCE = Range(above=0, below=1, why="it is a probability, and 0 and 1 bound nothing", example=0.05)
_MAX_EPSILON = 700.0
_TOLERANCE = 1e-9


@dataclass(frozen=True, kw_only=True)
class Risk(Value):
    """Limit on what a membership attack achieves, whatever it computes from what was released.

    One of three: `tpr` at `fpr`, `advantage`, or `posterior` from `prior`.

    Args:
        tpr: Largest true positive rate of a test whose false positive rate is `fpr`. As many guesses at
            any secret of a record are right at most, where `fpr` are without the release.
        fpr: False positive rate at which `tpr` is meant.
        advantage: Largest true positive rate less false positive rate.
        posterior: Largest chance that a guess whether the record took part is right.
        prior: Probability that it took part, before anything is released.

    **Guarantee.** A plan calibrated to it keeps it, for the neighbours that the calibration names:
    docs/guarantees/risk.md.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Poisson(rate=0.01),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=1.0),
    ... )
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
                f"a risk is a tpr at its fpr, an advantage, or a posterior from its prior, and {names} "
                "was passed: each limits another attack. Pass e.g. tpr=0.05, fpr=0.01."
            )
        for name, value in passed.items():
            object.__setattr__(self, name, _CHANCE.check(name, value))
        if self.max_gain <= 0:
            limit, known = ("tpr", "fpr") if self.tpr is not None else ("posterior", "prior")
            raise InvalidValue(
                f"{limit}={short_repr(passed[limit])} must be above {self._baseline:g} at {known}="
                f"{short_repr(passed[known])}: so much is attained without the release, and no noise "
                f"lowers it. Pass e.g. {limit}={(1 + 3 * self._baseline) / 4:.3g}.",
                key=limit,
            )

    @property
    def _baseline(self) -> float:
        """What is attained without the release: by a blind guess."""
        if self.fpr is not None:
            return self.fpr
        return 0.0 if self.prior is None else max(self.prior, 1 - self.prior)

    @property
    def max_gain(self) -> float:
        """How far an attack may exceed a blind guess."""
        limits = (self.tpr, self.advantage, self.posterior)
        return next(limit for limit in limits if limit is not None) - self._baseline

    def attained(self, attack: AttackBounds) -> float:
        """Upper bound on the rate, advantage or chance that this limits.

        Args:
            attack: Bounds on every test of what was released.
        """
        if self.fpr is not None:
            return attack.true_positive_rate(self.fpr)
        return attack.advantage if self.prior is None else attack.posterior(self.prior)

    def gain(self, attack: AttackBounds) -> float:
        """How far an attack exceeds a blind guess at most; within the limit if at most `max_gain`.

        Args:
            attack: Bounds on every test of what was released.
        """
        return max(0.0, self.attained(attack) - self._baseline)

    def budget(self, delta: float) -> Budget:
        """The largest epsilon at `delta` from which this limit follows, whatever the mechanism.

        Args:
            delta: Delta of the budget.

        Returns:
            The budget that a user of epsilon alone would have to keep.
        """

        def kept(epsilon: float) -> bool:
            return self.gain(ApproximateDP([(epsilon, delta)])) <= self.max_gain

        smallest = 1e-9
        if not kept(smallest):
            raise InvalidValue(
                f"delta={delta:g} must be below {self.max_gain:.3g}, which {self} leaves: with that "
                "probability the promise may fail, and all is known. Pass a smaller delta.",
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
"""What a calibration keeps to."""


def check_limit(limit: object) -> Limit:
    """The limit, if it is one; raises `InvalidValue` for anything else."""
    if not isinstance(limit, Budget | Risk):
        text = short_repr(limit) if isinstance(limit, str | float | int | None) else "..."
        raise InvalidValue(
            f"budget={text} must be a Budget or a Risk, not {with_article(type(limit).__name__)}. Pass "
            "e.g. hush.Budget(epsilon=3.0, delta=1e-5), or hush.Risk(tpr=0.05, fpr=0.01).",
            key="budget",
        )
    return limit


def allowance(limit: Limit) -> float:
    """The largest `cost` that is within a limit."""
    return limit.epsilon if isinstance(limit, Budget) else limit.max_gain


def cost(
    limit: Limit,
    counts: Mapping[Plan, int],
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
    *,
    ceiling: float = math.inf,
) -> float:
    """Upper bound on what a composition spends of a limit: epsilon, or the gain of an attack.

    Args:
        limit: Says which of the two, and where.
        counts: Number of steps of each plan.
        dimension: Number of parameters, where the charge depends on it.
        adjacency: What neighbours differ in.
        ceiling: An epsilon beyond which its value does not matter: it may be infinite then.

    Returns:
        The cost, to be held against `allowance`.
    """
    if isinstance(limit, Risk):
        return limit.gain(Attacker(counts, dimension, adjacency))
    return upper_epsilon(counts, limit.delta, dimension, adjacency, ceiling=ceiling)


def stated(limit: Limit) -> str:
    """The limit in words."""
    if isinstance(limit, Risk):
        return str(limit)
    return f"epsilon={limit.epsilon:g} at delta={limit.delta:g}"
