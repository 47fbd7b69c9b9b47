"""A wide residual network trained in mini-batches, with the Fisher information loss of some records.

A record takes part in a step with chance q. What the step tells about it is at most q times the mean,
over the others' draws, of what it tells if the record takes part (docs/guarantees/fisher.md, 3). So a
watched record is put into the batch that was drawn, if it is not in it, and the loss at that sum is
weighed by q; one step in so many, drawn at random, stands for those around it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

import hush
from hush.accounting.per_instance import fisher
from hush.core.parts import Noise
from hush.training.data import Batch
from hush.training.evaluate import evaluate
from hush.training.methods.public_bases import gradient_rows
from hush.training.step import PrivateStep
from hush_recipes.bounded.fisher_loss import FisherLoss
from hush_recipes.bounded.information import FisherInformationTable, spectrum


@dataclass(frozen=True, kw_only=True)
class Training:
    """One run: the mechanism, and how it is trained and watched."""

    kind: str
    scale: float
    """Deviation of the noise on the sum, over the clipping bound."""
    bound: float | None
    """Half the width of the support, over that deviation."""
    clip: float
    batch: int
    steps: int
    learning_rate: float
    momentum: float
    watched: int
    """Number of records whose loss is measured: the first ones."""
    moments: int
    """Number of steps it is measured in."""
    iterations: int
    failure: float
    seed: int

    def plan(self, records: int) -> hush.Plan:
        deviation = self.scale * self.clip
        noise: Noise = hush.Gaussian(multiplier=self.scale)
        if self.bound is not None:
            law = hush.Rectified if self.kind == "rectified" else hush.Truncated
            noise = law(scale=deviation, bound=self.bound * deviation)
        rate = min(1.0, self.batch / records)
        return hush.Plan(
            sampling=hush.Poisson(rate=rate), clipping=hush.Linf(norm=self.clip), noise=noise
        )


class WatchedStep(PrivateStep):
    """A step that shows the batch and the sum of its clipped gradients, before there is noise on it."""

    show: Callable[[int, Batch, Tensor], None]

    def private_gradient(self, batch: Batch) -> Tensor:
        total = self.clipped_sum(batch)
        self.show(self.steps, batch, total.clone())
        return self.privatize(total)


def passed_on(plan: hush.Plan) -> float:
    """How much the mean of a draw moves with a sum near 0: public, as it is the mechanism's alone.

    Learning rates are divided by it, so that all laws move the weights alike. For a truncated law it is
    the variance, and so the information; for a rectified one the chance to be inside.
    """
    noise = plan.noise
    if isinstance(noise, hush.Truncated):
        return float(fisher(plan, [0.0])[0]) * noise.scale**2
    if isinstance(noise, hush.Rectified):
        return math.erf(noise.bound / noise.scale / math.sqrt(2))
    return 1.0


def train(
    run: Training,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    test: tuple[Tensor, Tensor],
) -> tuple[float, FisherLoss]:
    """The test accuracy in percent, and the watched records' loss along the run (sensitive)."""
    x, y = data
    plan = run.plan(len(x))
    loss = nn.CrossEntropyLoss(reduction="none")
    optimizer = torch.optim.SGD(
        model.parameters(), lr=run.learning_rate / passed_on(plan), momentum=run.momentum
    )
    generator = torch.Generator(x.device).manual_seed(run.seed)
    step = WatchedStep(
        model, loss, optimizer, plan, records=len(x), randomness=hush.Randomness(generator=generator)
    )
    step.show = watch = Watch(run, model, loss, (x[: run.watched], y[: run.watched]), plan)
    for batch in step.batches(data, run.steps):
        step(batch)
    return 100 * evaluate(model, loss, test)["accuracy"], watch.loss


class Watch:
    """Adds up what the steps tell about some records."""

    def __init__(
        self,
        run: Training,
        model: nn.Module,
        loss_of: nn.Module,
        data: tuple[Tensor, Tensor],
        plan: hush.Plan,
    ) -> None:
        self.run, self.model, self.loss_of, self.data, self.plan = run, model, loss_of, data, plan
        self.loss = FisherLoss(records=len(data[0]))
        chosen = np.random.default_rng(run.seed)
        spans = np.array_split(np.arange(run.steps), min(run.moments, run.steps))
        self.moments = {int(chosen.choice(span)): len(span) for span in spans}
        """One step of each span of them, and how many it stands for."""
        self._information = FisherInformationTable(plan, data[0].device)
        self._starts = torch.Generator(data[0].device).manual_seed(run.seed)

    def __call__(self, step: int, batch: Batch, location: Tensor) -> None:
        if step not in self.moments:
            return
        inputs, targets = self.data
        gradients = gradient_rows(self.model, self.loss_of, self.data).clamp_(
            -self.run.clip, self.run.clip
        )
        indices = torch.arange(len(inputs), device=batch.indices.device)
        gradients[torch.isin(indices, batch.indices).to(gradients.device)] = (
            0.0  # they are in the sum already
        )
        eigenvalues = spectrum(
            self.model,
            self.loss_of,
            inputs,
            targets,
            self.plan.clipping,
            self._information.at(gradients.add_(location)),
            generator=self._starts,
            iterations=self.run.iterations,
            failure=self.run.failure,
        )
        squared = eigenvalues.upper.double().cpu().numpy() * self.moments[step]
        self.loss.add(squared, rate=self.plan.sampling.participation)
