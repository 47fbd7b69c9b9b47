"""Bars and tables as text."""

from collections.abc import Sequence
from dataclasses import dataclass


def bar(share: float, width: int = 24) -> str:
    """A bar of this share of the width; an arrow ends a longer one.

    >>> bar(0.5, width=4), bar(9.0, width=4)
    ('##', '###>')
    """
    return "#" * (width - 1) + ">" if share > 1 else "#" * round(share * width)


@dataclass(frozen=True, kw_only=True)
class Table:
    """A header and rows of cells, as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table as Markdown with aligned columns."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        rule = ["-" * width for width in widths]
        return "\n".join(
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in [self.header, rule, *self.rows]
        )
