"""Plots as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hush.audit.roc import Roc, ceiling


def plot_accuracy(
    path: Path,
    curves: Mapping[str, Sequence[tuple[float, float]]],
    *,
    ceiling: tuple[str, float],
    title: str,
) -> None:
    """Draw accuracy against the epsilon spent on the way, one curve a run, under a ceiling."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    label, level = ceiling
    axes.axhline(level, color="0.4", linestyle="--", linewidth=1, label=label)
    for name, points in curves.items():
        spent, accuracy = zip(*points, strict=True)
        (line,) = axes.plot(spent, accuracy, linewidth=1.5, label=name)
        axes.plot(spent[-1], accuracy[-1], "o", color=line.get_color())
    axes.set(xscale="log", xlabel="epsilon spent", ylabel="test accuracy", title=title)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path, dpi=150)


def draw_roc(
    axes: Any, curves: Mapping[str, Roc], ceilings: Mapping[str, tuple[float, float]], *, title: str
) -> None:
    """Draw each curve, and for each (epsilon, delta) the most that any attack could reach."""
    # rates below one in so many others were not measured
    least = min(1 / len(roc.others) for roc in curves.values())
    grid = np.geomspace(least, 1, 400)
    for name, roc in curves.items():
        false, true = roc.rates
        # a step function: between two thresholds nothing more is found
        axes.plot(false, true, drawstyle="steps-post", linewidth=1.2, label=name)
    for name, (epsilon, delta) in ceilings.items():
        axes.plot(grid, ceiling(grid, epsilon, delta), "--", color="0.3", linewidth=1, label=name)
    axes.plot(grid, grid, ":", color="0.6", linewidth=1, label="guessing")
    axes.set(
        xscale="log",
        yscale="log",
        xlim=(least, 1),
        ylim=(least, 1),
        xlabel="false positive rate",
        ylabel="true positive rate",
        title=title,
    )
    axes.legend(frameon=False, fontsize=7, loc="lower right")
