"""Plots as PNG files."""

from collections.abc import Mapping, Sequence
from pathlib import Path


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
