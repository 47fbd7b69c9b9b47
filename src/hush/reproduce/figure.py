"""What a recipe leaves behind: a table, a CSV and a PNG."""

import csv
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hush.report.table import Table


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure or table of a paper, ours beside theirs."""

    name: str
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[object]]
    draw: Callable[[Any], None]
    """Draws on matplotlib axes."""
    notes: Sequence[str] = ()

    def save(self, folder: Path) -> list[Path]:
        """Write NAME.csv and NAME.png; return their paths."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas

        folder.mkdir(parents=True, exist_ok=True)
        table, picture = folder / f"{self.name}.csv", folder / f"{self.name}.png"
        with table.open("w", newline="") as file:
            csv.writer(file).writerows([self.header, *self.rows])
        canvas = Canvas(figsize=(7, 4.2), layout="constrained")
        FigureCanvasAgg(canvas)
        axes = canvas.subplots()
        axes.set_title(self.title)
        axes.grid(alpha=0.3)
        self.draw(axes)
        canvas.savefig(picture, dpi=150)
        return [table, picture]

    def table(self) -> Table:
        """The rows as text."""
        return Table(header=self.header, rows=[[_cell(cell) for cell in row] for row in self.rows])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
