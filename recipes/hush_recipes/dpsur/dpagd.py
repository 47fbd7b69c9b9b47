"""Why DPAGD's accuracy falls as epsilon grows: moves that are not made.

DPAGD asks for the best of some evenly spaced step sizes, 0 among them. It takes 0 for a sign of a
noisy gradient, and buys a better one. Where the spacing is too coarse the answer is 0 however good the
gradient is, until the budget is gone; what ends that is noise in the answers, of which a larger epsilon
has less.

Table 2's linear layer on the first few records, with the noise a record that 60,000 records have at the
epsilon of the line.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from hush.core.errors import InvalidValue
from hush.core.guarantee import Budget
from hush.training.evaluate import evaluate
from hush_recipes.dpsur.adaptive import Adaptive, AdaptiveDescent
from hush_recipes.dpsur.gaussian_filter import GaussianFilter
from hush_recipes.dpsur.inputs import Inputs, inputs_on, network
from hush_recipes.dpsur.runs import DELTA
from hush_recipes.figure import Figure

RECORDS, ALL = 5000, 60_000
CLIP = 0.1
_LARGEST = 1e4
"""Epsilon of the few records."""
LONGEST = (1.0, 0.1)
"""Largest step size at first: Table 2's, and one whose twentieth is short enough."""


class Counted(AdaptiveDescent):
    """A descent that counts how often it asks for a step size."""

    asked = 0

    def loss_changes(self, direction: Tensor, lengths: list[float]) -> Tensor:
        self.asked += 1
        return super().loss_changes(direction, lengths)


@dataclass(frozen=True, kw_only=True)
class Descent:
    """Moves of a run, questions for a step size, and test accuracy in percent."""

    moves: int
    asked: int
    accuracy: float


def dpsur_dpagd(
    *, device: str = "cpu", epsilons: Sequence[float] = (1.0, 3.0), seeds: int = 1
) -> Figure:
    """How often DPAGD moves, how often it is told to stay, and its accuracy, by epsilon."""
    inputs = first_records(inputs_on("fashion-mnist", True, device), RECORDS)
    rows: list[list[Any]] = []
    for longest in LONGEST:
        for level in epsilons:
            budget = Budget(epsilon=equal_noise(level, inputs.records, ALL), delta=DELTA)
            runs = [descend(inputs, budget, longest, seed, device) for seed in range(seeds)]
            for seed, run in enumerate(runs):
                stays = run.asked - run.moves
                rows.append([longest, level, seed, run.moves, run.asked, stays, run.accuracy])
            print(f"  longest {longest:g}, epsilon {level:g}: {runs}", flush=True)

    def draw(axes: Any) -> None:
        for number, longest in enumerate(LONGEST):
            chosen = [row for row in rows if row[0] == longest]
            axes.plot([row[1] for row in chosen], [row[6] for row in chosen], "o", color=f"C{number}")
            means = [mean(row[6] for row in chosen if row[1] == level) for level in epsilons]
            axes.plot(epsilons, means, "-", color=f"C{number}", label=f"longest step {longest:g}")
        axes.set(xlabel="epsilon", ylabel="test accuracy, %")
        axes.legend()

    return Figure(
        name="dpsur-dpagd",
        title=f"DPAGD, a linear layer on Fashion-MNIST's features, {inputs.records} records",
        header=["longest", "epsilon", "seed", "moves", "asked", "told to stay", "accuracy %"],
        rows=rows,
        draw=draw,
        notes=[
            f"noise a record as {ALL:,} records have at that epsilon and delta {DELTA:g}: the true one "
            "of these few is larger",
            "told to stay: answers of 0, after each of which the gradient is bought again, 10% better",
        ],
    )


def first_records(inputs: Inputs, records: int) -> Inputs:
    """The inputs with the first of the training records alone."""
    x, y = inputs.train
    return Inputs(classes=inputs.classes, train=(x[:records], y[:records]), test=inputs.test)


def equal_noise(level: float, few: int, many: int) -> float:
    """The epsilon at which `few` records have the noise a record that `many` have at epsilon `level`."""

    def precision(epsilon: float) -> float:
        return GaussianFilter(Budget(epsilon=epsilon, delta=DELTA)).precision

    target = precision(level) * (many / few) ** 2
    if precision(_LARGEST) < target:
        raise InvalidValue(
            f"epsilon {level:g} of {many:,} records is more than {_LARGEST:g} of {few:,} with the same "
            "noise: there is hardly any. Pass e.g. --epsilons 1,3."
        )
    return float(brentq(lambda epsilon: precision(epsilon) / target - 1, level, _LARGEST, rtol=1e-4))


def descend(inputs: Inputs, budget: Budget, longest: float, seed: int, device: str) -> Descent:
    """One run of Table 2's DPAGD."""
    model = network("scattering-linear", inputs).to(device)
    settings = Adaptive(clip=CLIP, longest=longest)
    loss = nn.CrossEntropyLoss()
    generator = torch.Generator(device).manual_seed(seed)
    descent = Counted(model, loss, inputs.train, budget, settings, generator=generator)
    moves = sum(1 for _ in descent.run())
    accuracy = 100 * evaluate(model, loss, inputs.test)["accuracy"]
    return Descent(moves=moves, asked=descent.asked, accuracy=accuracy)
