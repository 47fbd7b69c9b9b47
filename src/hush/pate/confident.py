"""Confident-GNMax: a noisy argmax that is answered only if a noisy threshold test passes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from hush.accounting.calibrate import largest_affordable
from hush.accounting.epsilon import compose
from hush.accounting.mechanism import mechanism
from hush.clipping import Entries
from hush.core.errors import BudgetExceeded
from hush.core.guarantee import Budget, Guarantee
from hush.core.parts import Noise
from hush.core.plan import Plan
from hush.core.value import Value, check_count, number
from hush.pate.argmax import NoisyMax, as_scores, charged, check_additive, noisy
from hush.sampling import FullBatch

NO_ANSWER = -1
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e9


@dataclass(frozen=True, kw_only=True)
class Confident(Value):
    """A noisy argmax, asked only where the largest score plus noise of its own reaches `threshold`.

    Every query is charged for its test, those that pass also for the answer.

    Args:
        vote: The noisy argmax.
        threshold: What the largest score must reach after noise.
        noise: Noise of the test, in units of `vote.moved.norm`, by which that score moves at most.

    **Guarantee.** docs/guarantees/argmax.md, step 3: the number of queries, and the most that may be
    answered, are fixed beforehand.

    >>> import hush, torch
    >>> vote = NoisyMax.of_votes(noise=hush.Gaussian(multiplier=20.0))
    >>> confident = Confident(vote=vote, threshold=150.0, noise=hush.Gaussian(multiplier=20.0))
    >>> confident(torch.tensor([[0.0, 250.0, 0.0], [50.0, 10.0, 40.0]])).tolist()
    [1, -1]
    """

    vote: NoisyMax
    threshold: float = field(
        metadata=number(
            above=0, at_most=1e12, why="it is compared with the largest of the scores", example=200.0
        )
    )
    noise: Noise

    def __post_init__(self) -> None:
        super().__post_init__()
        check_additive(self.noise)
        mechanism(self.test)  # raises for what cannot be charged

    @property
    def test(self) -> Plan:
        """One test as the plan that a ledger charges."""
        # The largest of several scores moves no further than the one that moves furthest.
        moved = Entries(changed=1, norm=self.vote.moved.reference_norm)
        return Plan(sampling=FullBatch(), clipping=moved, noise=self.noise)

    def __call__(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Index of the largest noisy score of each row, `NO_ANSWER` where its test fails.

        Args:
            scores: A row a query, a column a class (sensitive).
            generator: Seeds the noise: for tests.
        """
        checked = as_scores(scores)
        return self.vote(checked, generator).where(self.passes(checked, generator), NO_ANSWER)

    def passes(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Whether the largest score of each row reaches the threshold after noise.

        Args:
            scores: A row a query, a column a class (sensitive).
            generator: Seeds the noise: for tests.
        """
        return noisy(self.test, scores.amax(1), generator) >= self.threshold

    def guarantee(self, queries: int, delta: float, answers: int | None = None) -> Guarantee:
        """Guarantee of a number of queries, for any scores.

        Args:
            queries: How many are tested.
            delta: Failure probability.
            answers: How many are answered at most; None: all.
        """
        counts = planned(self, queries, queries if answers is None else answers)
        return charged(counts, delta, self.vote.neighbours, self.vote.unit)


Query = NoisyMax | Confident


def planned(query: Query, queries: int, answers: int) -> Mapping[Plan, int]:
    """Number of runs of each plan, for `queries` queries with at most `answers` answers."""
    asked = check_count("queries", queries, "how many there are is fixed beforehand", at_least=1)
    answered = check_count("answers", answers, "how many there are is fixed beforehand", at_least=1)
    if isinstance(query, NoisyMax):
        return {query.plan: min(asked, answered)}
    counts = {query.test: asked}
    # With the same noise and one changed entry, test and vote are the same plan.
    counts[query.vote.plan] = counts.get(query.vote.plan, 0) + min(asked, answered)
    return counts


def with_noise(query: Query, budget: Budget, queries: int, answers: int) -> Query:
    """The query with the least noise that keeps all planned tests and answers within `budget`.

    Both noises of a `Confident` query keep their ratio.
    """

    def scaled(factor: float) -> Query:
        if isinstance(query, NoisyMax):
            return replace(query, noise=_times(query.noise, factor))
        vote = replace(query.vote, noise=_times(query.vote.noise, factor))
        return replace(query, vote=vote, noise=_times(query.noise, factor))

    def cost(precision: float) -> float:
        counts = planned(scaled(1 / precision), queries, answers)
        return compose(counts, budget.delta).epsilon.upper

    precision = largest_affordable(
        cost, budget.epsilon, start=1.0, low=1 / _MOST_NOISE, high=1 / _LEAST_NOISE, whole=False
    )
    if precision is None:
        raise BudgetExceeded(
            f"queries={queries} cost more than epsilon={budget.epsilon:g} at delta={budget.delta:g} "
            "with any noise considered: every answer reveals something. Ask fewer queries, or allow a "
            "larger budget."
        )
    return scaled(1 / precision)


def _times(noise: Any, factor: float) -> Noise:
    changed: Noise = replace(noise, multiplier=noise.multiplier * factor)
    return changed
