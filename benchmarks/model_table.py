"""Rows of the benchmark of real models, and tables of them."""

from collections.abc import Sequence
from dataclasses import dataclass

HEADER = "| model | step | records at a time | ms | times plain | peak MiB | times plain | note |"


@dataclass
class Row:
    """What one column took on one model."""

    model: str
    column: str
    precision: str
    logical: int
    physical: int
    milliseconds: float | None = None
    times_plain: float | None = None
    mebibytes: float | None = None
    plain_mebibytes: float | None = None
    note: str = ""

    @property
    def memory_times_plain(self) -> float | None:
        return self.mebibytes and self.plain_mebibytes and self.mebibytes / self.plain_mebibytes

    def __str__(self) -> str:
        cells = [self.model, self.column, f"{self.physical} of {self.logical}"]
        cells += [_cell(self.milliseconds, ".1f"), _cell(self.times_plain, ".2f")]
        cells += [_cell(self.mebibytes, ".0f"), _cell(self.memory_times_plain, ".2f"), self.note]
        return f"| {' | '.join(cells)} |"


def summary(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Tables of time and of memory, a line a model: of the plain step, and of others over it."""
    lines: list[str] = []
    for title in ("time", "peak memory"):
        lines += ["", f"| {title} | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for model in dict.fromkeys(row.model for row in rows):
            mine = [row for row in rows if row.model == model]
            cells = [_summary_cell(mine, column, title == "time") for column in columns]
            lines.append(f"| {model} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _summary_cell(rows: Sequence[Row], column: str, time: bool) -> str:
    """A column's cell; in brackets how many records at a time, where it could not be as many."""
    mine = [row for row in rows if row.column == column]
    if not mine:
        return "-"
    row = mine[-1]
    if column == "plain":
        return f"{_cell(row.milliseconds, '.0f')} ms" if time else f"{_cell(row.mebibytes, '.0f')} MiB"
    cell = _cell(row.times_plain if time else row.memory_times_plain, ".2f")
    return cell if len(mine) == 1 else f"{cell} ({row.physical})"


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
