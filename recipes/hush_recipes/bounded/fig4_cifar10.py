"""Figure 4 of the bounded-support paper: accuracy against Fisher information loss, the network part.

A wide residual network trained from scratch on CIFAR-10 in mini-batches of 200. Thinned: WRN-10-2, five
epochs in place of 150 and a learning rate of .1 in place of .03, one support for each law, the loss
of the first 48 records in ten of the steps.
"""

from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hush.data import load, tensors
from hush.models import build
from hush_recipes.bounded.fig4 import draw_frontiers
from hush_recipes.bounded.information import power_iteration_error
from hush_recipes.bounded.wide_resnet import Training, train
from hush_recipes.figure import Figure
from hush_recipes.workers import workers

MODEL, CLASSES = "wrn-10-2", 10
CLIP, BATCH, EPOCHS = 0.01, 200, 5
LEARNING_RATE, MOMENTUM = 0.1, 0.5
SCALES = (50.0, 100.0, 200.0, 400.0)
"""Deviation of the noise on the sum, over the clipping bound."""
LAWS: dict[str, float | None] = {"Gaussian": None, "rectified": 0.5, "truncated": 1.5}
"""Each with its half-width in deviations: those that did best in the linear part."""
WATCHED, MOMENTS, ITERATIONS, FAILURE = 48, 10, 20, 1e-6

Run = tuple[Training, str]


def bounded_fig4_cifar10(
    *, device: str = "cpu", seeds: int = 1, epochs: int = EPOCHS, processes: int | None = None
) -> Figure:
    """Accuracy against Fisher information loss, for a wide residual network on CIFAR-10."""
    grid = [(kind, scale, bound) for kind, bound in LAWS.items() for scale in SCALES]
    steps = epochs * (len(_tensors_on("cpu")[0]) // BATCH)
    runs: list[Run] = [
        (
            Training(
                kind=kind,
                scale=scale,
                bound=bound,
                clip=CLIP,
                batch=BATCH,
                steps=steps,
                learning_rate=LEARNING_RATE,
                momentum=MOMENTUM,
                watched=WATCHED,
                moments=MOMENTS,
                iterations=ITERATIONS,
                failure=FAILURE,
                seed=seed,
            ),
            device,
        )
        for kind, scale, bound in grid
        for seed in range(seeds)
    ]
    with workers(processes, device) as over:
        means = np.array(list(_reported(over(outcome, runs)))).reshape(len(grid), seeds, 3).mean(1)
    rows: list[list[Any]] = [
        [*point, *columns.tolist()] for point, columns in zip(grid, means, strict=True)
    ]
    loose = (1 - power_iteration_error(_tensors_on("cpu")[0][0].numel(), ITERATIONS, FAILURE)) ** -0.5

    return Figure(
        name="bounded-fig4-cifar10",
        title=f"Fisher information loss, {MODEL} on CIFAR-10 from scratch",
        header=["law", "sigma/C", "a/sigma", "accuracy %", "largest eta", "median eta"],
        rows=rows,
        draw=partial(draw_frontiers, rows),
        panels=2,
        notes=[
            f"{steps} steps, batches of {BATCH} drawn by chance, C {CLIP:g}, mean of {seeds} seed(s)",
            f"thinned: the paper takes 150 epochs and another network; here {epochs} and {MODEL}",
            f"loss of the first {WATCHED} records, of {MOMENTS} steps drawn at random, each for those "
            "around it: an estimate of the loss along one run, and no guarantee",
            f"upper ends of certified bounds: at most {loose:.2f} times the loss in those steps",
            "eta is about pixels in [0, 1]: an unbiased guess of one is off by 1/eta at least",
            "the learning rate is over the share of a small sum that the law passes on",
            "lines: no run of the same law is as accurate for less",
        ],
    )


def outcome(run: Run) -> tuple[float, float, float]:
    """Accuracy, largest and median loss of one run."""
    training, device = run
    torch.set_num_threads(1)
    x, y, x_test, y_test = _tensors_on(device)
    torch.manual_seed(training.seed)
    model = build(MODEL, classes=CLASSES, shape=x.shape[1:]).to(device)
    reached, loss = train(training, model, (x, y), (x_test, y_test))
    return reached, loss.largest, loss.median


def _reported(outcomes: Iterable[tuple[float, float, float]]) -> Iterable[tuple[float, float, float]]:
    for number, reached in enumerate(outcomes, 1):
        print(f"  run {number}: {reached[0]:.2f}%", flush=True)
        yield reached


@lru_cache(maxsize=2)
def _tensors_on(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, y, x_test, y_test = (value.to(device) for value in tensors(load("cifar10")))
    return x, y, x_test, y_test
