"""Figures: a plot as PNG, its numbers as CSV and as a table."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hush.report.text import Table

STYLE: Any = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 11,
    "figure.titlesize": 12,
    "font.size": 10,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4,
}
"""Of every figure, as matplotlib's parameters."""
COLORS = ("#3f51b5", "#bc4c00", "#1a7f37", "#8250df", "#57606a")
"""Colours of lines, in order; for a reader who does not see them, lines are labelled."""
LINES = 5
"""Most lines that are labelled at their ends."""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A plot and its numbers, as rows of a table."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    draw: Callable[[Any], None]
    """Draws on matplotlib axes, or on a list of them if there are several panels."""
    panels: int = 1
    across: int | None = None
    """Panels in a row; all of them by default."""
    summary: Table | None = None
    """Printed in place of the rows."""
    notes: Sequence[str] = ()

    def save(self, folder: Path) -> list[Path]:
        """Write NAME.csv and NAME.png; return their paths."""
        from cycler import cycler
        from matplotlib import rc_context
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas

        folder.mkdir(parents=True, exist_ok=True)
        table, picture = folder / f"{self.name}.csv", folder / f"{self.name}.png"
        with table.open("w", newline="") as file:
            csv.writer(file).writerows([self.header, *self.rows])
        across = self.across or self.panels
        down = -(-self.panels // across)
        with rc_context({**STYLE, "axes.prop_cycle": cycler(color=COLORS)}):
            size = (7, 4.2 * down) if across == 1 else (4 * across, 3.4 * down)
            canvas = Canvas(figsize=size, layout="constrained")
            FigureCanvasAgg(canvas)
            panels = list(canvas.subplots(down, across, squeeze=False).flat)[: self.panels]
            for unused in canvas.axes[self.panels :]:
                unused.remove()
            canvas.suptitle(self.title)
            self.draw(panels[0] if self.panels == 1 else panels)
            for axes in panels:
                label_lines(axes)
            canvas.savefig(picture, dpi=150)
        return [table, picture]

    def table(self) -> Table:
        """The rows, or their summary, as text."""
        return self.summary or Table(
            header=self.header, rows=[[cell(value) for value in row] for row in self.rows]
        )


def label_lines(axes: Any) -> None:
    """Label few lines at their ends, in place of a legend, if the ends are apart."""
    legend = axes.get_legend()
    handles, _ = axes.get_legend_handles_labels()
    if legend is None or len(handles) > LINES or any(handle not in axes.lines for handle in handles):
        return
    axes.figure.draw_without_rendering()  # limits and places of axes
    window, apart = axes.get_window_extent(), 13 * axes.figure.dpi / 72
    ends = []
    for line in handles:
        places = axes.transData.transform(line.get_xydata())
        seen = [(x, y) for x, y in places if window.x0 - 1 <= x <= window.x1 + 1]
        seen = [(x, y) for x, y in seen if window.y0 - 1 <= y <= window.y1 + 1]
        if not seen or max(seen)[0] < window.x0 + 0.9 * window.width:
            return
        ends.append((max(seen)[1], line))
    ends.sort(key=lambda end: end[0])
    heights: list[float] = []
    for height, _ in ends:
        heights.append(max([height, *(below + apart for below in heights[-1:])]))
    moved = [high - height for high, (height, _) in zip(heights, ends, strict=True)]
    centre = sum(moved) / len(moved)
    if any(abs(by - centre) > 1.4 * apart for by in moved):
        return
    legend.remove()
    for height, (_, line) in zip(heights, ends, strict=True):
        axes.annotate(
            line.get_label(),
            (1.02, (height - centre - window.y0) / window.height),
            xycoords="axes fraction",
            va="center",
            color=line.get_color(),
            fontsize=9,
        )


def cell(value: object) -> str:
    """A value of a row as text: four significant digits, a dash for None."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
