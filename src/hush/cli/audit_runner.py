"""A run made again with canaries, once or often, for `hush audit`."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.audit.canaries.directions import Directions, directions_for, mislabelled
from hush.audit.canaries.many_runs import ManyRuns, many_runs
from hush.audit.canaries.one_run import Guesses, OneRun, one_run
from hush.audit.canaries.planted import Planted, run_with_canaries
from hush.cli.experiment import Experiment
from hush.core.guarantee import Guarantee
from hush.core.plan import Plan
from hush.core.randomness import fresh_generator, seed_from

_CANARIES = 256


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What the canaries refute, beside the charge."""

    epsilon: float
    separation: float
    gaussian_epsilon: float
    charge: Guarantee
    canaries: int
    guesses: Guesses | None
    """Of one run with many canaries."""
    told: str
    """How it was found, in words."""


class AuditRunner:
    """Trains as the run did; coins, directions and noise are drawn anew, from a seed if there is one."""

    def __init__(
        self, *, made: Experiment, plan: Plan, steps: int, kind: str, others: bool, seed: int | None
    ) -> None:
        self._made, self._plan, self._steps = made, plan, steps
        self._kind, self._others = kind, others
        self._coins = fresh_generator() if seed is None else torch.Generator().manual_seed(seed)
        if seed is not None:
            torch.manual_seed(seed)

    def once(self, canaries: int | None, confidence: float) -> Finding:
        """Many canaries in one run, each by a fair coin."""
        model, optimizer = self._made.begin()
        trained = sum(value.numel() for value in model.parameters() if value.requires_grad)
        room = trained if self._kind == "gradient" else len(self._made.test[1])
        many = max(1, min(_CANARIES, room // 2)) if canaries is None else canaries
        included = torch.rand(many, generator=self._coins) < 0.5
        planted = self._run(model, optimizer, self._canaries(model, many), included)
        found = one_run(
            planted.scores.numpy(),
            included.numpy(),
            delta=self._made.settings.delta,
            confidence=confidence,
        )
        told = (
            f"{many} {self._kind} canaries, each in by a fair coin; {found.guesses.right} of "
            f"{found.guesses.made} guesses right"
        )
        return self._finding(found, planted.charge, many, found.guesses, told)

    def often(self, runs: int, confidence: float) -> Finding:
        """One canary, in every other run."""
        scores: dict[bool, list[float]] = {True: [], False: []}
        canary: tuple[Tensor, Tensor] | Directions | None = None
        for number in range(runs):
            model, optimizer = self._made.begin()
            canary = self._canaries(model, 1) if canary is None else canary
            included = number % 2 == 0
            planted = self._run(model, optimizer, canary, torch.tensor([included]))
            scores[included].append(float(planted.scores))
        found = many_runs(
            scores[True], scores[False], delta=self._made.settings.delta, confidence=confidence
        )
        told = f"{runs} runs, one {self._kind} canary in every other; half of them chose the threshold"
        return self._finding(found, planted.charge, 1, None, told)

    def _finding(
        self,
        found: OneRun | ManyRuns,
        charge: Guarantee,
        canaries: int,
        guesses: Guesses | None,
        told: str,
    ) -> Finding:
        return Finding(
            epsilon=found.epsilon,
            separation=found.separation,
            gaussian_epsilon=found.gaussian_epsilon,
            charge=charge,
            canaries=canaries,
            guesses=guesses,
            told=told,
        )

    def _canaries(self, model: nn.Module, many: int) -> tuple[Tensor, Tensor] | Directions:
        if self._kind == "input":
            return mislabelled(*self._made.test, many, self._made.classes, self._coins)
        each = nn.CrossEntropyLoss(reduction="none")
        return directions_for(self._plan, model, each, self._made.train, many, self._coins)

    def _run(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        canaries: tuple[Tensor, Tensor] | Directions,
        included: Tensor,
    ) -> Planted:
        secure = self._made.settings.secure
        own = torch.Generator(self._made.train[0].device).manual_seed(seed_from(self._coins))
        return run_with_canaries(
            model,
            nn.CrossEntropyLoss(),
            optimizer,
            self._plan,
            self._made.train,
            canaries,
            included,
            steps=self._steps,
            delta=self._made.settings.delta,
            others=self._others,
            generator=None if secure else own,
            secure=secure,
            views=self._made.views,
            public=self._made.public,
        )
