"""Figures: a plot as PNG, its numbers as CSV and as a table."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hush.report.text import Table


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
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas

        folder.mkdir(parents=True, exist_ok=True)
        table, picture = folder / f"{self.name}.csv", folder / f"{self.name}.png"
        with table.open("w", newline="") as file:
            csv.writer(file).writerows([self.header, *self.rows])
        across = self.across or self.panels
        down = -(-self.panels // across)
        canvas = Canvas(figsize=(7 if across == 1 else 5 * across, 4.2 * down), layout="constrained")
        FigureCanvasAgg(canvas)
        panels = list(canvas.subplots(down, across, squeeze=False).flat)[: self.panels]
        for axes in panels:
            axes.grid(alpha=0.3)
        canvas.suptitle(self.title)
        self.draw(panels[0] if self.panels == 1 else panels)
        canvas.savefig(picture, dpi=150)
        return [table, picture]

    def table(self) -> Table:
        """The rows, or their summary, as text."""
        return self.summary or Table(
            header=self.header, rows=[[cell(value) for value in row] for row in self.rows]
        )


def cell(value: object) -> str:
    """A value of a row as text: four significant digits, a dash for None."""
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
