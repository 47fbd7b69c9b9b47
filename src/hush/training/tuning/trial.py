"""One trial of a selection: its settings, plan and ledger, and what it may release."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch

from hush.accounting.ledger import Ledger
from hush.accounting.mechanism import mechanism
from hush.clipping import L2
from hush.core.errors import DataError, InvalidValue, LedgerError, Unproved, short_repr
from hush.core.guarantee import Adjacency, Arithmetic, Budget, Neighbours, Secrecy
from hush.core.plan import Plan
from hush.core.value import as_float, with_article
from hush.noise import Gaussian
from hush.sampling import FullBatch
from hush.training.methods.statistics import mean
from hush.training.tuning.space import Settings


@dataclass(kw_only=True, eq=False)
class TuningTrial:
    """What the training function of a selection is given beside its settings.

    Args:
        plan: Plan to train under, with the calibrated noise.
        steps: Number of training steps.
        budget: Epsilon and delta of one trial on its own: what its training steps cost.
        ledger: To which the training steps are charged; a new one for each trial.
        score_noise: Noise multiplier of the score on held-out records; None: scores are public.
        generator: Seeds the noise of scores, and of training if it is passed on, for tests; None: noise
            is from the operating system.
    """

    plan: Plan
    steps: int
    budget: Budget
    score_noise: float | None = None
    generator: torch.Generator | None = None
    ledger: Ledger = field(default_factory=Ledger)
    noisy_score: float | None = None
    """What `score` returned; None before it is called."""

    def score(self, values: npt.ArrayLike) -> float:
        """Noisy mean of a number in [0, 1] for each held-out private record, 0 for an empty slot.

        Call it once a trial; a record that is held out must take part in no training step.

        Args:
            values: e.g. whether the prediction for each record is right.

        Returns:
            The score to return with the model.
        """
        if self.score_noise is None:
            raise InvalidValue(
                "trial.score is for held-out private records, and this selection was declared with "
                "public scores: a noisy score would not be charged. Pass score_noise= to hush.tune, "
                "or return a score of records that need no protection.",
                key="score",
            )
        if self.noisy_score is not None:
            raise LedgerError(
                "trial.score was called twice: a trial is charged for one score of its held-out "
                "records, and another one would go uncharged. Score the final model alone."
            )
        rows = torch.as_tensor(values).detach().double().flatten()
        if not len(rows) or not bool(((rows >= 0) & (rows <= 1)).all()):
            raise DataError(
                "values of trial.score must be numbers in [0, 1], one for each held-out record: with "
                "no bound on a record's influence no noise hides it. Pass e.g. (predicted == labels)."
            )
        noisy = mean(
            rows[:, None],
            score_plan(self.score_noise),
            delta=self.budget.delta,
            generator=None if self.generator is None else _another(self.generator),
        )
        self.noisy_score = float(noisy.value[0])
        return self.noisy_score


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """What one trial returned, and what was charged to its ledger (sensitive unless it is the best)."""

    settings: Settings
    model: Any
    score: float
    """Minus infinity in place of no number."""
    adjacency: Adjacency
    arithmetic: Arithmetic
    randomness: Secrecy
    records: int | None


def score_plan(multiplier: float) -> Plan:
    """Plan of the score's release: a sum over held-out records of sensitivity 1."""
    return Plan(sampling=FullBatch(), clipping=L2(norm=1.0), noise=Gaussian(multiplier=multiplier))


def _another(generator: torch.Generator) -> torch.Generator:
    """A generator of another seed: the score must not have the noise of the training steps."""
    return torch.Generator().manual_seed(generator.initial_seed() ^ 1)


def outcome(settings: Settings, trial: TuningTrial, returned: object) -> Outcome:
    """The outcome of a trial; raises where it did something else than is charged."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        raise InvalidValue(
            f"the training function returned {with_article(type(returned).__name__)} and must return "
            "(model, score), the score one number, the larger the better: trials are compared by it."
        )
    model, score = returned
    if trial.score_noise is not None and (trial.noisy_score is None or score != trial.noisy_score):
        raise LedgerError(
            "the score of a trial is not the one that trial.score returned, and held-out private "
            "records were declared: a score without noise reveals them. Return trial.score(...), or "
            "leave out score_noise and score with records that need no protection."
        )
    ledger = trial.ledger
    if ledger.voided is not None:
        raise LedgerError(
            f"the ledger of a trial is void ({ledger.voided}): what was charged no longer covers what "
            "the trial released. Nothing was selected."
        )
    _check_charges(trial)
    if ledger.adjacency.slots > 1:
        raise Unproved(
            f"the training of a trial protects {ledger.adjacency}, and a selection is charged for one "
            "unit that is there or not: other changes are not proved. Train under zero-out."
        )
    guarantee = ledger.epsilon(trial.budget.delta)
    if trial.score_noise is not None and ledger.adjacency != Adjacency(neighbours=Neighbours.ZERO_OUT):
        raise InvalidValue(
            f"held-out scores are charged for one record, zero-out, and the training protects "
            f"{ledger.adjacency}: an owner may have several held-out records, and their number would "
            "show. Use scores of records that need no protection."
        )
    number = as_float(score)
    return Outcome(
        settings=settings,
        model=model,
        score=-math.inf if math.isnan(number) else number,
        adjacency=ledger.adjacency,
        arithmetic=guarantee.arithmetic,
        # a number of trials that can be worked out is not hidden
        randomness=guarantee.randomness if trial.generator is None else "seeded",
        records=guarantee.records,
    )


def _check_charges(trial: TuningTrial) -> None:
    """Raise unless a trial's ledger holds steps of its mechanism alone, as many as charged at most."""
    counts = trial.ledger.counts
    if not counts:
        raise LedgerError(
            "nothing was charged to trial.ledger: the selection is charged for private steps, and a "
            "model trained without them is not private. Pass ledger=trial.ledger to hush.train or "
            "PrivateStep."
        )
    allowed = mechanism(trial.plan)
    taken = 0
    for plan, count in counts.items():
        if mechanism(plan) != allowed:
            raise LedgerError(
                f"a trial was charged for {short_repr(plan)}, another mechanism than its own plan: the "
                "selection's charge does not cover it. Train under trial.plan, whose clipping norm may "
                "be replaced."
            )
        taken += count
    if taken > trial.steps:
        raise LedgerError(
            f"a trial took {taken} steps and is charged for {trial.steps}: the rest would go uncharged. "
            "Take trial.steps steps."
        )
