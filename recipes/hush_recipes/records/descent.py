"""Private descent to the mean of its last weights, with as little noise as a budget allows."""

from dataclasses import dataclass

import torch
from torch import nn

from hush.accounting.calibrate import calibrate
from hush.accounting.ledger import Ledger
from hush.clipping import L2
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.gradients.tree import Views
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.evaluate import evaluate
from hush.training.options import Randomness
from hush.training.step import PrivateStep
from hush_recipes.dpsur.inputs import Inputs
from hush_recipes.records.protocol import DELTA, Outcome

LOSS = nn.CrossEntropyLoss()


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Settings of a descent."""

    rate: float
    """Learning rate."""
    batch: int = 8192
    """Expected size; at most the number of records (full batch)."""
    steps: int = 300
    clip: float = 0.1
    momentum: float = 0.9
    tail: float = 0.3
    """Share of the steps over whose weights the mean is taken; 0: the last weights."""
    bfloat16: bool = False
    """Whether steps are under autocast."""

    def train(
        self,
        model: nn.Module,
        inputs: Inputs,
        epsilon: float,
        ledger: Ledger,
        seed: int,
        *,
        scored: nn.Module | None = None,
        views: Views | None = None,
    ) -> Outcome:
        """Train what is not frozen of a model, and score it.

        Args:
            model: to train.
            inputs: training and test records.
            epsilon: of everything on the ledger in the end.
            ledger: what was spent before.
            seed: of draws and noise.
            scored: made of the model, to score in its place.
            views: of a record, as in `PrivateStep`.
        """
        plan = calibrate(
            Plan(
                sampling=Poisson(rate=min(1.0, self.batch / inputs.records)),
                clipping=L2(norm=self.clip),
                noise=Gaussian(multiplier=1.0),
            ),
            Budget(epsilon=epsilon, delta=DELTA),
            self.steps,
            spent=ledger.counts,
        )
        device = inputs.train[0].device
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        step = PrivateStep(
            model,
            LOSS,
            torch.optim.SGD(trained, lr=self.rate, momentum=self.momentum),
            plan,
            records=inputs.records,
            ledger=ledger,
            randomness=Randomness(generator=torch.Generator(device).manual_seed(seed)),
            views=views,
        )
        tail = max(1, round(self.tail * self.steps))
        means = [torch.zeros_like(parameter) for parameter in trained]
        with torch.autocast(device.type, torch.bfloat16, enabled=self.bfloat16):
            for done, batch in enumerate(step.batches(inputs.train, steps=self.steps), start=1):
                step(batch)
                if done > self.steps - tail:
                    for mean, parameter in zip(means, trained, strict=True):
                        mean += parameter.detach() / tail
        with torch.no_grad():
            for mean, parameter in zip(means, trained, strict=True):
                parameter.copy_(mean)
        step.adopt_weights()  # a mean of released weights is post-processing
        assert isinstance(plan.noise, Gaussian)
        return Outcome(
            accuracy=evaluate(scored or model, LOSS, inputs.test)["accuracy"],
            epsilon=step.spent(DELTA).epsilon.upper,
            multiplier=plan.noise.multiplier,
        )
