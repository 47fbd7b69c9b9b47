"""Figure 3 of the bounded-support paper: epsilon for the records at hand at equal accuracy.

Full-batch descent of a linear model on fixed features. Of every mechanism the epsilon at which it
reaches an accuracy, over the Gaussian's; by the paper's one-sided charge and by both.
"""

from functools import partial
from typing import Any

import numpy as np

import hush
from hush.report.text import Table
from hush_recipes.bounded.fig4 import frontier
from hush_recipes.bounded.probe import DATA, DELTA, KINDS, STEPS, accuracy, descent, features, grid
from hush_recipes.figure import Figure

TARGETS = tuple(float(target) for target in np.arange(65.0, 79.0))


def bounded_fig3(*, device: str = "cpu", seeds: int = 3) -> Figure:
    """Ratios of per-instance epsilons at equal accuracy, rectified and truncated, on Fashion-MNIST."""
    x, y, x_test, y_test = features(device)
    rows: list[list[Any]] = []
    for point in grid():
        results = []
        for seed in range(seeds):
            run = descent(point, x, y, seed)
            *_, weights = run.run(STEPS)
            results.append((accuracy(weights, x_test, y_test), run.paper(), run.charged()))
        published = hush.epsilon(point.plan(), steps=STEPS, delta=DELTA, dimension=weights.numel())
        means = [sum(column) / seeds for column in zip(*results, strict=True)]
        rows.append([point.kind, point.scale, point.bound, *means, published.epsilon.upper])
    ratios = [ratios_at(rows, target) for target in TARGETS]

    return Figure(
        name="bounded-fig3",
        title=f"Linear probing, scattering of {DATA}: records at hand",
        header=["law", "sigma/C", "a/sigma", "accuracy %", "paper", "charged", "published"],
        rows=rows,
        draw=partial(draw_ratios, ratios),
        summary=Table(
            header=[
                "accuracy >=",
                *(f"{kind}, {of}" for kind in KINDS[1:] for of in ("paper", "charged")),
            ],
            rows=[[as_text(cell) for cell in row] for row in ratios],
        ),
        notes=[
            f"{STEPS} full-batch steps, delta {DELTA:g}, mean of {seeds} seed(s); all runs: the CSV",
            "ratios of epsilons added up along a run: for the records at hand, and no guarantee",
            "published: for any records; equal for the Gaussian and the rectified law",
            "picked by looking at test accuracy and records: nothing here was paid for",
        ],
    )


def draw_ratios(ratios: list[list[float | None]], axes: Any) -> None:
    """Both ways to charge each law, over the accuracy reached."""
    for k, kind in enumerate(KINDS[1:]):
        for column, line, name in ((1, "o-", "charged"), (0, "--", "paper")):
            values = [row[1 + 2 * k + column] for row in ratios]
            targets = [row[0] for row in ratios]
            axes.plot(targets, values, line, color=f"C{k}", label=f"{kind}, {name}")
    axes.axhline(1.0, color="gray", linestyle=":")
    axes.set(xlabel="test accuracy reached, %", ylabel="epsilon over the Gaussian's")
    axes.legend()


def ratios_at(rows: list[list[Any]], target: float) -> list[float | None]:
    """The target, and each law's epsilon there over the Gaussian's, by the paper's charge and by both.

    Between runs that no other of the law beats, logarithms of epsilon are interpolated: a grid of sigmas
    has steps, and which law takes the next one first would decide. None beyond the runs there are.
    """
    results: list[float | None] = [target]
    for kind in KINDS[1:]:
        for column in (4, 5):
            own, gaussian = (
                _epsilon_at(frontier(rows, law, column), target) for law in (kind, KINDS[0])
            )
            results.append(None if own is None or gaussian is None else own / gaussian)
    return results


def _epsilon_at(front: list[tuple[float, float]], target: float) -> float | None:
    epsilons, reached = zip(*front, strict=True)
    if not reached[0] <= target <= reached[-1]:
        return None
    return float(np.exp(np.interp(target, reached, np.log(epsilons))))


def as_text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
