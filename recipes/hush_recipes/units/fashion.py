"""What it costs to protect owners instead of images: Fashion-MNIST, epsilon 3 for either.

The owners are made up (`owners.py`). Learning rate and steps of each row are those of the best accuracy
on the last 10,000 training images, left out for that, and the accuracy is of runs on all training
images; the choice is not charged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hush.accounting.calibrate import calibrate
from hush.accounting.epsilon import epsilon
from hush.clipping import L2
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.data import load, tensors
from hush.models import build
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush.training.loop import train
from hush.training.options import Logging, Randomness, Units
from hush_recipes.figure import Figure
from hush_recipes.units.owners import LARGEST, made_up_owners
from hush_recipes.workers import workers

DELTA, EPSILON = 1e-5, 3.0
VALIDATION = 10_000


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training run: `per_unit` records of an owner, None for a run that protects images."""

    per_unit: int | None
    batch: int
    """Images or owners a step, on average."""
    steps: int
    learning_rate: float
    seed: int = 0
    validate: bool = False
    device: str = "cpu"


def units_fashion(
    *,
    device: str = "cpu",
    seeds: int = 1,
    steps: int | None = None,
    learning_rates: Sequence[float] = (0.1, 0.2, 0.5),
    per_unit: Sequence[int] = (1, 5, 20),
    processes: int = 1,
) -> Figure:
    """Accuracy at epsilon 3 for one image, and for one owner of up to 50 images. CPU: 30 steps."""
    lengths = (steps,) if steps else (30,) if device == "cpu" else (300, 1000)
    batches: dict[int | None, int] = {None: 2048, **dict.fromkeys(per_unit, 1024)}
    rows: list[list[Any]] = []
    with workers(processes, device) as over:
        for most, batch in batches.items():
            candidates = [
                Run(
                    per_unit=most,
                    batch=batch,
                    steps=length,
                    learning_rate=rate,
                    validate=True,
                    device=device,
                )
                for length in lengths
                for rate in learning_rates
            ]
            scores = list(over(_accuracy, candidates))
            best = candidates[scores.index(max(scores))]
            finals = [
                Run(**{**vars(best), "seed": seed, "validate": False}) for seed in range(1, seeds + 1)
            ]
            accuracies = [100 * accuracy for accuracy in over(_accuracy, finals)]
            plan, units = _plan(finals[0])
            owner = epsilon(plan, best.steps, DELTA, group=1 if most else LARGEST).epsilon.upper
            spread = stdev(accuracies) if seeds > 1 else None
            rows.append(
                [
                    "one owner" if most else "one image",
                    *(most, units, batch, best.steps, best.learning_rate),
                    *(plan.noise.to_plain()["multiplier"], owner, mean(accuracies), spread),
                ]
            )
            print("  " + "; ".join(map(str, rows[-1])), flush=True)

    def draw(axes: Any) -> None:
        names = ["one image", *(f"one owner, k = {row[1]}" for row in rows[1:])]
        axes.barh(
            names[::-1], [row[-2] for row in rows][::-1], xerr=[row[-1] or 0 for row in rows][::-1]
        )
        axes.set(xlabel="test accuracy, %", xlim=(70, 90))

    return Figure(
        name="units-fashion",
        title=f"Fashion-MNIST, epsilon {EPSILON:g} at delta {DELTA:g} for one image or one owner",
        header=[
            *("protected", "k", "units", "batch", "steps", "learning rate"),
            *("noise", "epsilon of an owner", "accuracy %", "spread"),
        ],
        rows=rows,
        draw=draw,
        notes=[
            f"mean and standard deviation of {seeds} seed(s); learning rate and steps by validation",
            f"owners are made up: 1 to {LARGEST} images each (Zipf), who prefer some classes",
            f"epsilon of an owner: of {LARGEST} images together, where images are protected",
        ],
    )


@lru_cache(maxsize=1)
def _data(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, np.ndarray[Any, Any]]:
    """Images and labels for training and testing, and the owners of the former."""
    x, y, x_test, y_test = (value.to(device) for value in tensors(load("fashion-mnist")))
    return x, y, x_test, y_test, made_up_owners(y.cpu().numpy())


def _records(run: Run) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], np.ndarray[Any, Any]]:
    """Training records, evaluation records, owners of the former."""
    x, y, x_test, y_test, owners = _data(run.device)
    if not run.validate:
        return (x, y), (x_test, y_test), owners
    return (x[:-VALIDATION], y[:-VALIDATION]), (x[-VALIDATION:], y[-VALIDATION:]), owners[:-VALIDATION]


def _plan(run: Run) -> tuple[Plan, int]:
    """The plan of a run, with as little noise as its budget allows, and its number of units."""
    (x, _), _, owners = _records(run)
    units = len(np.unique(owners)) if run.per_unit else len(x)
    plan = Plan(
        sampling=Poisson(rate=run.batch / units),
        clipping=L2(norm=0.1),
        noise=Gaussian(multiplier=1.0),
    )
    return calibrate(plan, Budget(epsilon=EPSILON, delta=DELTA), run.steps), units


def _accuracy(run: Run) -> float:
    private, evaluation, owners = _records(run)
    plan, _ = _plan(run)
    torch.manual_seed(run.seed)
    model = build("mnist-cnn", classes=10, shape=private[0].shape[1:]).to(run.device)
    result = train(
        model,
        nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=10 * run.learning_rate, momentum=0.9),
        plan,
        private,
        budget=Budget(epsilon=EPSILON, delta=DELTA),
        steps=run.steps,
        evaluation=evaluation,
        logging=Logging(every=run.steps),
        units=Units(owners=owners, per_unit=run.per_unit) if run.per_unit else None,
        randomness=Randomness(generator=torch.Generator().manual_seed(run.seed)),
    )
    return float(result.metrics[-1]["accuracy"])
