"""Figure 4 of the bounded-support paper: accuracy against Fisher information loss, the linear part.

The runs of Figure 3's grid. A record's loss is the spectral norm of diag(eta) J, summed in squares over
the steps; J the Jacobian of its clipped gradient, in closed form. Over the first records of the training
set: what is called the largest is the largest of those.
"""

from functools import partial
from typing import Any

import numpy as np
import torch

from hush.accounting.per_instance import fisher
from hush_recipes.bounded.fisher_loss import FisherLoss
from hush_recipes.bounded.information import power_iteration, softmax_regression
from hush_recipes.bounded.probe import CLIP, DATA, KINDS, STEPS, accuracy, descent, features, grid
from hush_recipes.figure import Figure

WATCHED, ITERATIONS, FAILURE = 100, 20, 1e-6


def bounded_fig4(*, device: str = "cpu", seeds: int = 3) -> Figure:
    """Accuracy against Fisher information loss, for a linear model on Fashion-MNIST."""
    x, y, x_test, y_test = features(device)
    rows: list[list[Any]] = []
    for point in grid():
        results = []
        for seed in range(seeds):
            run, loss = descent(point, x, y, seed, charging=False), FisherLoss(records=WATCHED)
            before = run.weights
            for weights in run.run(STEPS):
                information = torch.as_tensor(fisher(run.plan, run.location)).to(x)
                normal = softmax_regression(before, x[:WATCHED], y[:WATCHED], CLIP, information)
                start = torch.randn(
                    WATCHED,
                    x.shape[1],
                    generator=torch.Generator(device).manual_seed(seed),
                    device=device,
                )
                spectrum = power_iteration(normal, start, iterations=ITERATIONS, failure=FAILURE)
                loss.add(spectrum.upper.double().cpu().numpy())
                before = weights
            results.append((accuracy(weights, x_test, y_test), loss.largest, loss.median))
        rows.append([point.kind, point.scale, point.bound, *np.mean(results, 0).tolist()])

    return Figure(
        name="bounded-fig4",
        title=f"Fisher information loss, linear probing, scattering of {DATA}",
        header=["law", "sigma/C", "a/sigma", "accuracy %", "largest eta", "median eta"],
        rows=rows,
        draw=partial(draw_frontiers, rows),
        panels=2,
        notes=[
            f"{STEPS} full-batch steps, mean of {seeds} seed(s); loss of {WATCHED} records, upper ends",
            "eta is about the features: an unbiased guess of one of them is off by 1/eta at least",
            "lines: no run of the same law is as accurate for less",
        ],
    )


def draw_frontiers(rows: list[list[Any]], panels: Any) -> None:
    """Accuracy over the largest and over the median loss."""
    from matplotlib.ticker import LogLocator

    for panel, column, name in ((panels[0], 4, "largest"), (panels[1], 5, "median")):
        for k, kind in enumerate(KINDS):
            front = frontier(rows, kind, column)
            panel.plot(*zip(*front, strict=True), "o-", color=f"C{k}", label=kind)
        panel.set(xscale="log", xlabel=f"{name} eta", ylabel="test accuracy, %")
        # less than two decades: labels of every digit would overlap
        panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        panel.xaxis.set_major_formatter("{x:g}")
        panel.xaxis.set_minor_formatter("")
    panels[0].legend()


def frontier(rows: list[list[Any]], kind: str, column: int) -> list[tuple[float, float]]:
    """Loss and accuracy of the runs that no other beats in both."""
    points = sorted((row[column], row[3]) for row in rows if row[0] == kind)
    best: list[tuple[float, float]] = []
    for loss, reached in points:
        if not best or reached > best[-1][1]:
            best.append((loss, reached))
    return best
