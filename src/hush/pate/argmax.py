"""Private argmax: report-noisy-max of scores or votes (GNMax, GGNMax), and Confident-GNMax."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from hush.accounting.calibrate import largest_affordable
from hush.accounting.epsilon import compose
from hush.accounting.mechanism import mechanism
from hush.clipping import Entries
from hush.core.errors import BudgetExceeded, DataError, Unproved
from hush.core.guarantee import Bound, Budget, Guarantee, Neighbours
from hush.core.parts import Clipping, Noise
from hush.core.plan import Plan
from hush.core.value import Value, check_count, number
from hush.noise import sample
from hush.sampling import FullBatch

NO_ANSWER = -1
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e9
_THRESHOLD = number(above=0, at_most=1e12, why="it is compared with the largest score", example=200.0)


@dataclass(frozen=True, kw_only=True)
class NoisyMax(Value):
    """Report noisy max: the index of the largest score after adding independent noise.

    Args:
        noise: Additive noise on every score, in units of `moved.norm`.
        moved: Sensitivity of the scores. `Entries` if a record changes `changed` scores (or counts) by
            at most `norm` each; `L2` or `Lp` for a bound on the norm of the change.
        neighbours: Adjacency relation of the sensitivity.
        unit: Unit of privacy, in words.

    **Guarantee.** It does not depend on the scores: docs/guarantees/argmax.md.

    >>> import hush, torch
    >>> noisy_max = NoisyMax.of_votes(noise=hush.Gaussian(multiplier=20.0))
    >>> noisy_max(torch.tensor([[0.0, 250.0, 0.0]])).tolist()
    [1]
    >>> print(noisy_max.guarantee(queries=100, delta=1e-5))
    epsilon <= 2.9433 (no lower bound) at delta 1e-05 (dp, replace one vote, proved, publishable)
    """

    noise: Noise
    moved: Clipping
    neighbours: Neighbours
    unit: str = "one record"

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_proved(self.plan)

    @classmethod
    def of_votes(cls, *, noise: Noise, neighbours: Neighbours = Neighbours.REPLACE) -> Self:
        """Noisy argmax of vote counts: replacing a vote changes two counts by 1, adding a vote changes
        one count.

        Args:
            noise: Additive noise; its multiplier is in votes.
            neighbours: Adjacency relation: one vote is replaced, or added or removed.
        """
        changed = 2 if neighbours is Neighbours.REPLACE else 1
        return cls(noise=noise, moved=Entries(changed=changed), neighbours=neighbours, unit="one vote")

    @classmethod
    def of_teachers(cls, *, noise: Noise) -> Self:
        """Noisy argmax of the votes of PATE teachers: one record changes one vote, and thus two counts.

        Args:
            noise: Additive noise; its multiplier is in votes.
        """
        return cls(noise=noise, moved=Entries(changed=2), neighbours=Neighbours.ADD_REMOVE)

    @property
    def plan(self) -> Plan:
        """Plan of one query, for the ledger."""
        return Plan(sampling=FullBatch(), clipping=self.moved, noise=self.noise)

    @property
    def vote(self) -> "NoisyMax":
        """The noisy argmax itself, as `Confident` also has this property."""
        return self

    def __call__(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Index of the largest noisy score of each row.

        Args:
            scores: Scores, one row per query and one column per class. The caller accounts for each row.
            generator: Source of the noise seed, for tests.
        """
        return noisy(self.plan, as_scores(scores), generator).argmax(1)

    def calibrated(self, budget: Budget, queries: int) -> Self:
        """Copy with the least noise for `queries` answers within the budget (`hush.calibrate`).

        Args:
            budget: Maximum privacy cost of all queries.
            queries: Number of queries.
        """
        return with_noise(self, budget, queries, queries)

    def guarantee(self, queries: int, delta: float) -> Guarantee:
        """Guarantee for a number of answers, for any scores.

        Args:
            queries: Number of answers.
            delta: Failure probability.
        """
        return charged(self, {self.plan: queries}, delta)


@dataclass(frozen=True, kw_only=True)
class Confident(Value):
    """Confident-GNMax: noisy argmax if the largest score plus separate noise reaches `threshold`.

    Args:
        vote: Noisy argmax.
        threshold: Threshold on the noisy largest score.
        noise: Noise of the test, in units of `vote.moved.norm`, the sensitivity of the largest score.

    **Guarantee.** Valid if the number of queries and the maximum number of answers are fixed in advance:
    docs/guarantees/argmax.md, step 3.

    >>> import hush, torch
    >>> vote = NoisyMax.of_votes(noise=hush.Gaussian(multiplier=20.0))
    >>> confident = Confident(vote=vote, threshold=150.0, noise=hush.Gaussian(multiplier=20.0))
    >>> confident(torch.tensor([[0.0, 250.0, 0.0], [50.0, 10.0, 40.0]])).tolist()
    [1, -1]
    """

    vote: NoisyMax
    threshold: float = field(metadata=_THRESHOLD)
    noise: Noise

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_proved(self.test)

    @property
    def test(self) -> Plan:
        """Plan of one test, for the ledger."""
        # a maximum changes by at most the largest change of an entry
        moved = Entries(changed=1, norm=self.vote.moved.reference_norm)
        return Plan(sampling=FullBatch(), clipping=moved, noise=self.noise)

    def __call__(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Index of the largest noisy score of each row; `NO_ANSWER` if its test fails.

        Args:
            scores: Scores, one row per query and one column per class (sensitive).
            generator: Source of the noise seed, for tests.
        """
        checked = as_scores(scores)
        return self.vote(checked, generator).where(self.passes(checked, generator), NO_ANSWER)

    def passes(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Whether the largest score of each row plus noise reaches the threshold.

        Args:
            scores: Scores, one row per query and one column per class (sensitive).
            generator: Source of the noise seed, for tests.
        """
        return noisy(self.test, scores.amax(1), generator) >= self.threshold

    def calibrated(self, budget: Budget, queries: int) -> Self:
        """Copy with the least noise for `queries` answers within the budget (`hush.calibrate`).

        Args:
            budget: Maximum privacy cost of all queries.
            queries: Number of queries.
        """
        return with_noise(self, budget, queries, queries)

    def guarantee(self, queries: int, delta: float, answers: int | None = None) -> Guarantee:
        """Guarantee for a number of queries, for any scores.

        Args:
            queries: Number of tests.
            delta: Failure probability.
            answers: Maximum number of answers; by default all queries.
        """
        counts = planned(self, queries, queries if answers is None else answers)
        return charged(self.vote, counts, delta)


Query = NoisyMax | Confident
AnyQuery = TypeVar("AnyQuery", bound=Query)


def planned(query: Query, queries: int, answers: int) -> dict[Plan, int]:
    """Number of charges of each plan, for `queries` queries with at most `answers` answers."""
    why = "the number is fixed in advance"
    asked = check_count("queries", queries, why, at_least=1)
    answered = min(asked, check_count("answers", answers, why, at_least=1))
    counts = {} if isinstance(query, NoisyMax) else {query.test: asked}
    # test and vote have the same plan if their noise is equal and one entry changes
    counts[query.vote.plan] = counts.get(query.vote.plan, 0) + answered
    return counts


def with_noise(query: AnyQuery, budget: Budget, queries: int, answers: int) -> AnyQuery:
    """Copy of the query with the least noise within `budget`.

    The ratio of the two noise scales of a `Confident` is unchanged.
    """

    def scaled(factor: float) -> Any:
        noises: list[Any] = [query.vote.noise, query.noise]
        vote_noise, noise = (each.with_multiplier(each.multiplier * factor) for each in noises)
        vote = replace(query.vote, noise=vote_noise)
        return vote if isinstance(query, NoisyMax) else replace(query, vote=vote, noise=noise)

    def cost(precision: float) -> float:
        return compose(planned(scaled(1 / precision), queries, answers), budget.delta).epsilon.upper

    precision = largest_affordable(
        cost, budget.epsilon, start=1.0, low=1 / _MOST_NOISE, high=1 / _LEAST_NOISE, whole=False
    )
    if precision is None:
        raise BudgetExceeded(
            f"queries={queries} cost more than epsilon={budget.epsilon:g} at delta={budget.delta:g} "
            "for every noise scale. Pass fewer queries, or allow a larger budget."
        )
    return scaled(1 / precision)  # type: ignore[no-any-return]


def _check_proved(plan: Plan) -> None:
    """Raise unless the noise is additive and the plan has a proof."""
    if not plan.noise.additive:
        raise Unproved(
            f"noise={plan.noise!r} has bounded support, so large scores cannot be distinguished. "
            "Use Gaussian, Laplace or GeneralizedGaussian.",
            key="noise",
        )
    mechanism(plan)


def noisy(plan: Plan, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Add the noise of one query to the scores, in double precision."""
    norm = plan.clipping.reference_norm
    return sample(plan.noise, scores.shape, norm=norm, location=scores, generator=generator)


def charged(vote: NoisyMax, counts: Mapping[Plan, int], delta: float) -> Guarantee:
    """Guarantee of the answers with the given charges."""
    # no lower bound: the argmax reveals less than the noisy scores
    bound = Bound(lower=0.0, upper=compose(counts, delta).epsilon.upper)
    return Guarantee(epsilon=bound, delta=delta, neighbours=vote.neighbours, unit=vote.unit)


def as_scores(scores: Tensor) -> Tensor:
    """Validate scores and convert them to double precision."""
    scores = torch.as_tensor(scores)
    real = not scores.is_complex() and bool(scores.isfinite().all())
    if scores.dim() != 2 or scores.shape[1] < 2 or not real:
        raise DataError(
            f"scores of shape {tuple(scores.shape)} must be finite numbers, one row per query and one "
            "column per class, at least two. Pass e.g. vote counts of shape (queries, classes)."
        )
    return scores.detach().to("cpu", torch.float64)
