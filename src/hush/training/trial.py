"""Trials of private hyperparameter tuning: search spaces, trials and their outcomes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

import numpy.typing as npt
import torch

from hush.accounting.ledger import Ledger
from hush.accounting.mechanism import mechanism
from hush.clipping import L2
from hush.core.errors import DataError, InvalidValue, LedgerError, Unproved, short_repr
from hush.core.guarantee import RECORD, Budget
from hush.core.plan import Plan
from hush.core.value import as_float
from hush.noise import Gaussian
from hush.sampling import FullBatch
from hush.training.methods.statistics import mean

Settings = dict[str, Any]


@dataclass(frozen=True)
class Uniform:
    """Uniform distribution, for a search space of `hush.tune`.

    Args:
        low: Smallest number.
        high: Largest number.
    """

    low: float
    high: float

    least: ClassVar[float] = -math.inf

    def __post_init__(self) -> None:
        low, high = as_float(self.low), as_float(self.high)
        if not (self.least < low <= high < math.inf):
            kind = type(self).__name__
            raise InvalidValue(
                f"{kind}({short_repr(self.low)}, {short_repr(self.high)}) must be finite numbers "
                f"above {self.least:g} in increasing order. Pass e.g. {kind}(0.1, 10.0)."
            )
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def _draw(self, pick: Random) -> float:
        return pick.uniform(self.low, self.high)

    @property
    def first(self) -> float:
        """Smallest number."""
        return self.low


@dataclass(frozen=True)
class LogUniform(Uniform):
    """Log-uniform distribution, e.g. for learning rates and clipping norms.

    Args:
        low: Smallest number, above 0.
        high: Largest number.
    """

    least: ClassVar[float] = 0.0

    def _draw(self, pick: Random) -> float:
        value = math.exp(pick.uniform(math.log(self.low), math.log(self.high)))
        return min(max(value, self.low), self.high)


@dataclass(frozen=True)
class Choice:
    """Uniform distribution over several values.

    Args:
        values: Numbers or strings.
    """

    values: tuple[Any, ...]

    def __init__(self, *values: Any) -> None:
        object.__setattr__(self, "values", values)
        if not values:
            raise InvalidValue("Choice() has no value. Pass e.g. hush.Choice(0.5, 1.0).")

    def _draw(self, pick: Random) -> Any:
        return pick.choice(self.values)

    @property
    def first(self) -> Any:
        """First value."""
        return self.values[0]


Dimension = Uniform | Choice


def check_space(space: object) -> Mapping[str, Dimension]:
    """Validate a search space."""
    if not isinstance(space, Mapping) or not space:
        raise InvalidValue(
            f"space={short_repr(space)} must be a dictionary of ranges: the proof covers independent "
            "trials, but not adaptive searches (Bayesian optimisation, successive halving, "
            'Optuna). Pass e.g. space={"learning_rate": hush.LogUniform(0.1, 10.0)}.',
            key="space",
        )
    for name, dimension in space.items():
        if not isinstance(name, str) or not isinstance(dimension, Dimension):
            raise InvalidValue(
                f"space[{short_repr(name)}]={short_repr(dimension)} must be a range with a string name. "
                "Pass hush.Uniform, hush.LogUniform or hush.Choice.",
                key="space",
            )
    return space


def draw_settings(space: Mapping[str, Dimension], pick: Random) -> Settings:
    """Draw the hyperparameters of one trial."""
    return {name: dimension._draw(pick) for name, dimension in space.items()}


@dataclass(kw_only=True, eq=False)
class TuningTrial:
    """Trial of private hyperparameter tuning, passed to the training function.

    Args:
        plan: Plan with the calibrated noise.
        steps: Number of training steps.
        budget: Epsilon and delta of one trial alone.
        ledger: New ledger for the training steps of this trial.
        score_noise: Noise multiplier of the score on held-out records; None for scores on public
            records.
        generator: Seed of the scores, for tests. Pass it to `hush.train` to also seed the training.
    """

    plan: Plan
    steps: int
    budget: Budget
    score_noise: float | None = None
    generator: torch.Generator | None = None
    ledger: Ledger = field(default_factory=Ledger)
    noisy_score: float | None = None
    """Result of `score`; None before the call."""

    def score(self, values: npt.ArrayLike) -> float:
        """Noisy mean of values in [0, 1], one per held-out private record (0 for an empty slot).

        Call this method once per trial, and return the result with the model. The held-out records must
        not be used for training.
        """
        if self.score_noise is None:
            raise InvalidValue(
                "trial.score needs score_noise, because scores on held-out private records have a "
                "privacy cost. Pass score_noise= to hush.tune, or return a score on records that need "
                "no protection.",
                key="score",
            )
        if self.noisy_score is not None:
            raise LedgerError(
                "trial.score was called twice, but a trial is charged for one score. Score only the "
                "final model."
            )
        rows = torch.as_tensor(values).detach().double().flatten()
        if not len(rows) or not bool(((rows >= 0) & (rows <= 1)).all()):
            raise DataError(
                "values of trial.score must be numbers in [0, 1], one for each held-out record. Pass "
                "e.g. (predicted == labels)."
            )
        # use a different seed, so scores and training have different noise
        seed = None if self.generator is None else self.generator.initial_seed() ^ 1
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        noise = Gaussian(multiplier=self.score_noise)
        plan = Plan(sampling=FullBatch(), clipping=L2(norm=1.0), noise=noise)
        noisy = mean(rows[:, None], plan, delta=self.budget.delta, generator=generator)
        self.noisy_score = float(noisy.value[0])
        return self.noisy_score


@dataclass(frozen=True, kw_only=True, eq=False)
class Outcome:
    """Result of one trial (sensitive unless it is the best trial)."""

    settings: Settings
    model: Any
    score: float
    """Score, with NaN replaced by minus infinity."""
    charged: dict[str, Any]
    """Arguments for the charge of the selection, from the trial's ledger."""


def outcome(settings: Settings, trial: TuningTrial, returned: tuple[Any, float]) -> Outcome:
    """Outcome of a trial; raise if the charge of the selection does not cover the trial."""
    (model, score), ledger, counts = returned, trial.ledger, trial.ledger.counts
    if trial.score_noise is not None and (trial.noisy_score is None or score != trial.noisy_score):
        raise LedgerError(
            "the score of a trial is not the result of trial.score, and score_noise was passed for "
            "held-out private records. Return trial.score(...), or leave out score_noise and use "
            "records that need no protection."
        )
    if ledger.voided is not None:
        raise LedgerError(
            f"the ledger of a trial is void ({ledger.voided}), and no model was selected. Train with "
            "private steps only."
        )
    if not counts:
        raise LedgerError(
            "trial.ledger has no charge: a model trained without private steps is not private. "
            "Pass ledger=trial.ledger to hush.train or PrivateStep."
        )
    for plan in counts:
        if mechanism(plan) != mechanism(trial.plan):
            raise LedgerError(
                f"a trial was charged for {short_repr(plan)}, which differs from its plan. Train with "
                "trial.plan; only its clipping norm may be replaced."
            )
    if (taken := sum(counts.values())) > trial.steps:
        raise LedgerError(
            f"a trial ran {taken} steps, but is charged for {trial.steps}. Run trial.steps steps."
        )
    if ledger.adjacency.slots > 1:
        raise Unproved(
            f"the adjacency of a trial is {ledger.adjacency}, but private selection is proved only for "
            "zero-out and add/remove. Train under zero-out."
        )
    if trial.score_noise is not None and ledger.adjacency != RECORD:
        raise InvalidValue(
            f"held-out scores are charged for one record (zero-out), but the adjacency of training is "
            f"{ledger.adjacency}: a user may have several held-out records. Use scores on records that "
            "need no protection."
        )
    guarantee, number = ledger.epsilon(trial.budget.delta), as_float(score)
    charged = {
        "adjacency": ledger.adjacency,
        "arithmetic": guarantee.arithmetic,
        # a seed reveals the number of trials
        "randomness": guarantee.randomness if trial.generator is None else "seeded",
        "records": guarantee.records,
    }
    worth = -math.inf if math.isnan(number) else number
    return Outcome(settings=settings, model=model, score=worth, charged=charged)
