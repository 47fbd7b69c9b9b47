"""Training runs with canaries for `hush audit`: one run with many, or many runs with one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.audit.canaries import CanaryRun, Directions, directions_for, mislabelled, run_with_canaries
from hush.audit.lower_bound import CanaryBound, many_runs, one_run
from hush.cli.experiment import Experiment
from hush.core.plan import Plan
from hush.core.randomness import fresh_generator, seed_from

_CANARIES = 256


@dataclass(frozen=True, kw_only=True)
class AuditRunner:
    """Trains as a run did, with new coins, directions and noise.

    Args:
        experiment: Records, model and optimizer of the run.
        plan: Plan of the run.
        steps: Number of steps.
        kind: Kind of the canaries, "gradient" or "input".
        others: Whether the run's own records take part.
        seed: Seed of coins and noise; None: secret.
        done: Called after each step.
    """

    experiment: Experiment
    plan: Plan
    steps: int
    kind: str
    others: bool
    seed: int | None
    done: Callable[[], None]

    def one_run(self, canaries: int | None, confidence: float) -> tuple[CanaryBound, CanaryRun, int]:
        """The bound from many canaries in one run, each included by a fair coin; their number."""
        coins = self._coins()
        model, optimizer = self.experiment.initialise()
        trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
        room = trained if self.kind == "gradient" else len(self.experiment.test[1])
        count = max(1, min(_CANARIES, room // 2)) if canaries is None else canaries
        included = torch.rand(count, generator=coins) < 0.5
        run = self._train(model, optimizer, self._canaries(model, count, coins), included, coins)
        delta = self.experiment.settings.delta
        bound = one_run(run.scores.numpy(), included.numpy(), delta=delta, confidence=confidence)
        return bound, run, count

    def many_runs(self, runs: int, confidence: float) -> tuple[CanaryBound, CanaryRun]:
        """The bound from one canary, included in every other run."""
        coins = self._coins()
        scores: dict[bool, list[float]] = {True: [], False: []}
        canary: tuple[Tensor, Tensor] | Directions | None = None
        for number in range(runs):
            model, optimizer = self.experiment.initialise()
            canary = self._canaries(model, 1, coins) if canary is None else canary
            included = number % 2 == 0
            run = self._train(model, optimizer, canary, torch.tensor([included]), coins)
            scores[included].append(float(run.scores))
        delta = self.experiment.settings.delta
        return many_runs(scores[True], scores[False], delta=delta, confidence=confidence), run

    def _coins(self) -> torch.Generator:
        if self.seed is None:
            return fresh_generator()
        torch.manual_seed(self.seed)
        return torch.Generator().manual_seed(self.seed)

    def _canaries(
        self, model: nn.Module, count: int, coins: torch.Generator
    ) -> tuple[Tensor, Tensor] | Directions:
        experiment = self.experiment
        if self.kind == "input":
            return mislabelled(*experiment.test, count, experiment.classes, coins)
        loss = nn.CrossEntropyLoss(reduction="none")
        return directions_for(self.plan, model, loss, experiment.train, count, coins)

    def _train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        canaries: tuple[Tensor, Tensor] | Directions,
        included: Tensor,
        coins: torch.Generator,
    ) -> CanaryRun:
        experiment, secure = self.experiment, self.experiment.settings.secure
        generator = None  # without a seed, the noise of an audit is secret
        if self.seed is not None and not secure:
            generator = torch.Generator(experiment.train[0].device).manual_seed(seed_from(coins))
        return run_with_canaries(
            model,
            nn.CrossEntropyLoss(),
            optimizer,
            self.plan,
            experiment.train,
            canaries,
            included,
            steps=self.steps,
            delta=experiment.settings.delta,
            others=self.others,
            generator=generator,
            secure=secure,
            views=experiment.views,
            public=experiment.public,
            done=self.done,
        )
