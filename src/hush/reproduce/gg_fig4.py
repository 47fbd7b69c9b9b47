"""Figure 4 of the generalized Gaussian paper: beta-DP-SGD on Adult, accuracy against the noise's shape.

A network of two layers, 12 shapes beta in [1, 4], three seeds. Gradients are clipped in l_beta up to
beta 2 and in l2 above, and the noise is calibrated soundly. As in the paper, the clipping norm is the
best of a few by test accuracy, which no epsilon here accounts for.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch
from torch import nn

from hush.accounting.calibrate import calibrate
from hush.accounting.charge import epsilon
from hush.clipping import L2, Lp
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.data import load, tensors
from hush.models import build
from hush.noise import GeneralizedGaussian
from hush.reproduce.figure import Figure
from hush.sampling import Poisson
from hush.training.loop import train

DATA = "adult"
BETAS = tuple(round(float(beta), 4) for beta in np.linspace(1, 4, 12))
EPSILONS = (1.0, 2.0, 4.0)
DELTA = 1e-6
BATCH = 256
EPOCHS = 10
LEARNING_RATE = 1.0
CLIPS = (0.1, 0.5, 2.0)
SEEDS = 3


@dataclass(frozen=True)
class Noise:
    """The noise of one shape at one epsilon, for a clipping norm of 1."""

    plan: Plan
    budget: Budget
    steps: int
    published: float
    """What the paper's accounting would say that it costs."""


def gg_fig4() -> Figure:
    """The accuracy of a network on Adult, by the shape of the noise."""
    records = len(load(DATA).y_train)
    rate, steps = BATCH / records, EPOCHS * records // BATCH
    cells = [(beta, level) for level in EPSILONS for beta in BETAS]
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as workers:
        noises = list(workers.map(enough, [(beta, level, rate, steps) for beta, level in cells]))
        runs = [(noise, clip, seed) for noise in noises for clip in CLIPS for seed in range(SEEDS)]
        found = np.array(list(workers.map(accuracy, runs))).reshape(len(cells), len(CLIPS), SEEDS)
    best = found.mean(2).argmax(1)
    rows = []
    for (beta, level), noise, clip, each in zip(cells, noises, best, found, strict=True):
        scale = noise.plan.noise.to_plain()["multiplier"]
        own = each[clip]
        rows.append(
            [level, beta, scale, CLIPS[clip], float(own.mean()), float(own.std(ddof=1)), noise.published]
        )

    def draw(axes: Any) -> None:
        for level in EPSILONS:
            mine = [row for row in rows if row[0] == level]
            axes.errorbar(
                *([row[column] for row in mine] for column in (1, 4, 5)),
                fmt="o-",
                markersize=3,
                capsize=2,
                label=f"epsilon {level:g}",
            )
        axes.set(xlabel="beta", ylabel="test accuracy")
        axes.legend(frameon=False)

    return Figure(
        name="gg-fig4",
        title=f"beta-DP-SGD on Adult, delta {DELTA:g}, sound accounting",
        header=["epsilon", "beta", "scale", "clip", "accuracy", "deviation", "published epsilon"],
        rows=rows,
        draw=draw,
        notes=[
            f"mean and deviation of {SEEDS} seeds, {EPOCHS} epochs, batches of {BATCH}; the clip "
            "is the best of a few by test accuracy",
            "published epsilon: what the one-dimensional accounting says of the same noise",
        ],
    )


def enough(setting: tuple[float, float, float, int]) -> Noise:
    """The least noise of a shape for an epsilon."""
    beta, level, rate, steps = setting
    plan = Plan(
        sampling=Poisson(rate=rate),
        clipping=Lp(p=beta, norm=1.0) if beta <= 2 else L2(norm=1.0),
        noise=GeneralizedGaussian(beta=beta, multiplier=1.0),
    )
    budget = Budget(epsilon=level, delta=DELTA)
    found = calibrate(plan, budget, steps)
    said = epsilon(found, steps, DELTA, dimension=1, mode="published")
    return Noise(found, budget, steps, said.epsilon.upper)


def accuracy(run: tuple[Noise, float, int]) -> float:
    """The test accuracy of one training run."""
    noise, clip, seed = run
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    data = load(DATA)
    x, y, x_test, y_test = tensors(data)
    model = build("mlp", classes=data.classes, shape=x.shape[1:])
    result = train(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=LEARNING_RATE),
        replace(noise.plan, clipping=replace(noise.plan.clipping, norm=clip)),  # type: ignore[call-arg]
        (x, y),
        budget=noise.budget,
        steps=noise.steps,
        evaluation=(x_test, y_test),
        generator=torch.Generator().manual_seed(seed),
    )
    return float(result.metrics[-1]["accuracy"])
