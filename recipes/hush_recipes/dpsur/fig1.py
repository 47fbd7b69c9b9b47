"""Figure 1 of the DPSUR paper: the path of the weights of a linear regression, with and without a test.

A slope and an intercept, 5,000 synthetic records, one epsilon for both methods and as many trials of
selective release as steps of DP-SGD. The paper prints no settings.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hush.accounting.calibrate import calibrate
from hush.clipping import L2
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.noise import Gaussian
from hush.report.text import Table
from hush.sampling import Poisson
from hush.training.options import Randomness
from hush.training.step import PrivateStep
from hush_recipes.figure import Figure

RECORDS, BATCH, TEST_BATCH = 5000, 10, 50
TRUE, START, SPREAD = (1.5, 0.5), (-2.0, -1.5), 0.5
"""Slope and intercept of the records, those to begin with, and the deviation of the records' noise."""
BUDGET = Budget(epsilon=0.5, delta=1e-5)
LEARNING_RATES = (1.0, 0.2)
"""The first one is drawn."""


@dataclass(frozen=True, kw_only=True)
class Path:
    """Weights after each step, from the first ones on, and which steps were accepted."""

    weights: list[tuple[float, float]]
    losses: list[float]
    accepted: list[bool]


def dpsur_fig1(*, steps: int = 60, seeds: int = 20) -> Figure:
    """Trajectories of DP-SGD and of selective release on a linear regression, at one epsilon."""
    start = Plan(
        sampling=Poisson(rate=BATCH / RECORDS), clipping=L2(norm=1.0), noise=Gaussian(multiplier=1.0)
    )
    test = Selective(rate=TEST_BATCH / RECORDS, clip=0.001, multiplier=1.3, test="mean")
    plans = {
        "DP-SGD": calibrate(start, BUDGET, steps=steps),
        "DPSUR": calibrate(replace(start, release=test), BUDGET, steps=steps),
    }
    paths = {
        (name, rate): [_path(plan, rate, steps, seed) for seed in range(seeds)]
        for rate in LEARNING_RATES
        for name, plan in plans.items()
    }
    rows = [
        [name, rate, k, *weights, loss, accepted]
        for (name, rate), (path, *_) in paths.items()
        for k, (weights, loss, accepted) in enumerate(
            zip(path.weights, path.losses, [True, *path.accepted], strict=True)
        )
    ]

    def draw(axes: Any) -> None:
        slope, intercept = np.meshgrid(np.linspace(-2.5, 2.5, 80), np.linspace(-2.2, 1.6, 80))
        excess = ((slope - TRUE[0]) ** 2 + (intercept - TRUE[1]) ** 2 + SPREAD**2) / 2
        axes.contour(slope, intercept, excess, levels=12, colors="0.8", linewidths=0.8)
        for name, color in (("DP-SGD", "C0"), ("DPSUR", "C3")):
            path = paths[name, LEARNING_RATES[0]][0]
            axes.plot(*zip(*path.weights, strict=True), ".-", color=color, lw=1, label=name)
        axes.plot(*TRUE, "k*", ms=12, label="optimum")
        axes.set(xlabel="slope", ylabel="intercept")
        axes.legend()

    return Figure(
        name="dpsur-fig1",
        title=f"Path of the weights, epsilon {BUDGET.epsilon:g}, {steps} steps",
        header=["method", "learning rate", "step", "slope", "intercept", "loss", "moved"],
        rows=rows,
        draw=draw,
        summary=Table(
            header=[
                *("method", "learning rate", "noise", "updates", "of them worse", "last loss", "+-"),
                "least possible",
            ],
            rows=[_summary(name, rate, plans[name], runs) for (name, rate), runs in paths.items()],
        ),
        notes=[
            f"means over {seeds} seed(s); the picture and the CSV file have the first",
            f"each line costs epsilon {BUDGET.epsilon:g} at delta {BUDGET.delta:g}, rejected or not",
            "of them worse: updates after which the loss of all records is larger (not private)",
        ],
    )


def _summary(name: str, rate: float, plan: Plan, runs: list[Path]) -> list[str]:
    last = np.array([path.losses[-1] for path in runs])
    moved = [np.diff(path.losses)[path.accepted] for path in runs]
    worse = np.mean(np.concatenate(moved) > 0)
    updates = np.mean([len(changes) for changes in moved])
    return [
        *(
            name,
            f"{rate:g}",
            f"{plan.noise.to_plain()['multiplier']:.3g}",
            f"{updates:.1f}",
            f"{100 * worse:.0f}%",
        ),
        *(f"{last.mean():.4f}", f"{last.std():.4f}", f"{_least():.4f}"),
    ]


def records() -> tuple[Tensor, Tensor]:
    """Synthetic records: a number, and a noisy linear function of it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(RECORDS, 1, generator=generator)
    return x, TRUE[0] * x + TRUE[1] + SPREAD * torch.randn(RECORDS, 1, generator=generator)


def _least() -> float:
    """The loss of the least-squares solution."""
    x, y = records()
    design = torch.cat([x, torch.ones_like(x)], 1)
    return float((design @ torch.linalg.lstsq(design, y).solution - y).square().mean() / 2)


def _half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().mean(1) / 2


def _path(plan: Plan, rate: float, steps: int, seed: int) -> Path:
    torch.set_num_threads(1)
    x, y = records()
    model = nn.Linear(1, 1)
    with torch.no_grad():
        model.weight.fill_(START[0])
        model.bias.fill_(START[1])
    step = PrivateStep(
        model,
        _half_square,
        torch.optim.SGD(model.parameters(), lr=rate),
        plan,
        records=RECORDS,
        randomness=Randomness(generator=torch.Generator().manual_seed(seed)),
    )

    def state() -> tuple[tuple[float, float], float]:
        with torch.no_grad():
            return (model.weight.item(), model.bias.item()), float(_half_square(model(x), y).mean())

    states, accepted = [state()], []
    for batch in step.batches((x, y), steps=steps):
        accepted.append(bool(step(batch)))
        states.append(state())
    weights, losses = zip(*states, strict=True)
    return Path(weights=list(weights), losses=list(losses), accepted=accepted)
