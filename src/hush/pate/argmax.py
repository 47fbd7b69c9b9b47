"""Private argmax: report-noisy-max of scores or votes (GNMax, GGNMax)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from hush.accounting.epsilon import compose
from hush.accounting.mechanism import mechanism
from hush.clipping import L2, Entries, Linf, Lp
from hush.core.errors import DataError, Unproved
from hush.core.guarantee import Bound, Guarantee, Neighbours
from hush.core.parts import Clipping, Noise
from hush.core.plan import Plan
from hush.core.value import Value
from hush.noise import sample
from hush.sampling import FullBatch


@dataclass(frozen=True, kw_only=True)
class NoisyMax(Value):
    """The index of the largest score after independent noise on every score.

    Args:
        noise: Additive noise on every score, in units of `moved.norm`.
        moved: Sensitivity of the scores: `Entries` for counts, and for scores each of which changes by
            `norm` at most (`changed` is then the number of scores); `L2` or `Lp` where the norm of the
            whole change is known.
        neighbours: Adjacency relation under which the scores move so far.
        unit: What neighbours differ by, in words.

    **Guarantee.** The guarantee of the noisy scores, of which the answer is a function:
    docs/guarantees/argmax.md. It does not depend on the scores and may be published.

    >>> import hush, torch
    >>> noisy_max = NoisyMax.of_votes(noise=hush.Gaussian(multiplier=20.0))
    >>> noisy_max(torch.tensor([[0.0, 250.0, 0.0]])).tolist()
    [1]
    >>> print(noisy_max.guarantee(queries=100, delta=1e-5))
    epsilon <= 2.9432 (and >= 0) at delta 1e-05 (dp, replace one vote, proved, publishable)
    """

    noise: Noise
    moved: Clipping
    neighbours: Neighbours
    unit: str = "one record"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_additive(self.noise)
        mechanism(self.plan)  # raises for what cannot be charged

    @classmethod
    def of_votes(cls, *, noise: Noise, neighbours: Neighbours = Neighbours.REPLACE) -> Self:
        """The noisy argmax of vote counts: replacing a vote moves two counts by 1, adding one moves one.

        Args:
            noise: its multiplier is in votes.
            neighbours: replace, or add/remove, one vote.
        """
        changed = 2 if neighbours is Neighbours.REPLACE else 1
        return cls(noise=noise, moved=Entries(changed=changed), neighbours=neighbours, unit="one vote")

    @classmethod
    def of_teachers(cls, *, noise: Noise) -> Self:
        """The noisy argmax of teachers on disjoint records: a record changes one vote, so two counts.

        Args:
            noise: its multiplier is in votes.
        """
        return cls(noise=noise, moved=Entries(changed=2), neighbours=Neighbours.ADD_REMOVE)

    @property
    def plan(self) -> Plan:
        """One query as the plan that a ledger charges."""
        return Plan(sampling=FullBatch(), clipping=self.moved, noise=self.noise)

    def __call__(self, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Index of the largest noisy score of each row.

        Args:
            scores: a row a query, a column a class; each row is to be charged.
            generator: seeds the noise, for tests.
        """
        return noisy(self.plan, as_scores(scores), generator).argmax(1)

    def guarantee(self, queries: int, delta: float) -> Guarantee:
        """Guarantee of a number of answers, for any scores.

        Args:
            queries: How many are answered.
            delta: Failure probability.
        """
        return charged({self.plan: queries}, delta, self.neighbours, self.unit)


def check_additive(noise: Noise) -> None:
    """Raise for noise that is not added to the scores: nothing is proved of such answers."""
    if not noise.additive:
        raise Unproved(
            f"noise={noise!r} is drawn on a fixed support, on which scores beyond it look alike: the "
            "charge is for noise that is added to every score. Use Gaussian, Laplace or "
            "GeneralizedGaussian.",
            key="noise",
        )


def covers_a_vote(moved: Clipping) -> bool:
    """Whether a sensitivity allows one vote to move from one class to another: two counts by 1."""
    if isinstance(moved, Entries):
        return moved.changed >= 2 and moved.norm >= 1
    norms = {L2: math.sqrt(2), Linf: 1.0}
    needed = norms.get(type(moved), 2 ** (1 / moved.p) if isinstance(moved, Lp) else math.inf)
    return moved.reference_norm >= needed


def noisy(plan: Plan, scores: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Scores plus the noise of queries under `plan`, in double precision; to be used once."""
    return sample(
        plan.noise, scores.shape, norm=plan.clipping.reference_norm, location=scores, generator=generator
    )


def charged(counts: Mapping[Plan, int], delta: float, neighbours: Neighbours, unit: str) -> Guarantee:
    """Guarantee of answers whose noisy scores are charged as `counts`."""
    # The lower bound is for the noisy scores; their argmax reveals less.
    bound = Bound(lower=0.0, upper=compose(counts, delta).epsilon.upper)
    return Guarantee(epsilon=bound, delta=delta, neighbours=neighbours, unit=unit)


def as_scores(scores: Tensor) -> Tensor:
    """The scores in double precision; raises unless there is a row a query and two classes or more."""
    scores = torch.as_tensor(scores)
    real = not scores.is_complex() and bool(scores.isfinite().all())
    if scores.dim() != 2 or scores.shape[1] < 2 or not real:
        raise DataError(
            f"scores of shape {tuple(scores.shape)} must be finite numbers, one row a query and one "
            "column a class, at least two: noise hides a finite difference only. Pass e.g. counts of "
            "votes of shape (queries, classes)."
        )
    return scores.detach().to("cpu", torch.float64)
