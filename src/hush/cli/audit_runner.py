"""Training runs with canaries for `hush audit`: one run with many, or many runs with one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.audit.canaries.directions import Directions, directions_for, mislabelled
from hush.audit.canaries.many_runs import ManyRuns, many_runs
from hush.audit.canaries.one_run import Guesses, OneRun, one_run
from hush.audit.canaries.planted import CanaryRun, run_with_canaries
from hush.cli.experiment import Experiment
from hush.core.guarantee import Guarantee
from hush.core.plan import Plan
from hush.core.randomness import fresh_generator, seed_from

_CANARIES = 256


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """A lower bound on epsilon beside the charge."""

    bound: OneRun | ManyRuns
    charge: Guarantee
    canaries: int
    guesses: Guesses | None
    """Membership guesses of one run with many canaries."""
    summary: str
    """The design of the audit, in words."""


class AuditRunner:
    """Trains as the run did; coins, directions and noise are drawn anew, from a seed if there is one.

    `done` is called after each step.
    """

    def __init__(
        self,
        *,
        experiment: Experiment,
        plan: Plan,
        steps: int,
        kind: str,
        others: bool,
        seed: int | None,
        done: Callable[[], None] = lambda: None,
    ) -> None:
        self._experiment, self._plan, self._steps = experiment, plan, steps
        self._kind, self._others = kind, others
        self._delta, self._done = experiment.settings.delta, done
        self._seeded = seed is not None
        self._coins = fresh_generator() if seed is None else torch.Generator().manual_seed(seed)
        if seed is not None:
            torch.manual_seed(seed)

    def one_run(self, canaries: int | None, confidence: float) -> AuditResult:
        """The bound from many canaries in one run, each included by a fair coin."""
        model, optimizer = self._experiment.initialise()
        trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
        room = trained if self._kind == "gradient" else len(self._experiment.test[1])
        count = max(1, min(_CANARIES, room // 2)) if canaries is None else canaries
        included = torch.rand(count, generator=self._coins) < 0.5
        planted = self._train(model, optimizer, self._canaries(model, count), included)
        bound = one_run(
            planted.scores.numpy(), included.numpy(), delta=self._delta, confidence=confidence
        )
        guesses = bound.guesses
        return AuditResult(
            bound=bound,
            charge=planted.charge,
            canaries=count,
            guesses=guesses,
            summary=f"{count} {self._kind} canaries, each in by a fair coin; {guesses.right} of "
            f"{guesses.made} guesses right",
        )

    def many_runs(self, runs: int, confidence: float) -> AuditResult:
        """The bound from one canary, included in every other run."""
        scores: dict[bool, list[float]] = {True: [], False: []}
        canary: tuple[Tensor, Tensor] | Directions | None = None
        for number in range(runs):
            model, optimizer = self._experiment.initialise()
            canary = self._canaries(model, 1) if canary is None else canary
            included = number % 2 == 0
            planted = self._train(model, optimizer, canary, torch.tensor([included]))
            scores[included].append(float(planted.scores))
        return AuditResult(
            bound=many_runs(scores[True], scores[False], delta=self._delta, confidence=confidence),
            charge=planted.charge,
            canaries=1,
            guesses=None,
            summary=f"{runs} runs, one {self._kind} canary in every other; half of them chose the "
            "threshold",
        )

    def _canaries(self, model: nn.Module, count: int) -> tuple[Tensor, Tensor] | Directions:
        experiment = self._experiment
        if self._kind == "input":
            return mislabelled(*experiment.test, count, experiment.classes, self._coins)
        per_sample_loss = nn.CrossEntropyLoss(reduction="none")
        return directions_for(self._plan, model, per_sample_loss, experiment.train, count, self._coins)

    def _train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        canaries: tuple[Tensor, Tensor] | Directions,
        included: Tensor,
    ) -> CanaryRun:
        experiment = self._experiment
        secure = experiment.settings.secure
        generator = None  # the noise of an audit without a seed is as secret as a run's
        if self._seeded and not secure:
            generator = torch.Generator(experiment.train[0].device).manual_seed(seed_from(self._coins))
        return run_with_canaries(
            model,
            nn.CrossEntropyLoss(),
            optimizer,
            self._plan,
            experiment.train,
            canaries,
            included,
            steps=self._steps,
            delta=self._delta,
            others=self._others,
            generator=generator,
            secure=secure,
            views=experiment.views,
            public=experiment.public,
            done=self._done,
        )
