"""Tables as text: one list of rows, shown in a terminal, in Markdown or in HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape


@dataclass(frozen=True, kw_only=True)
class Table:
    """A header and rows of cells that are already text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """The table as Markdown, columns aligned so that it also reads well as plain text."""
        lines = [self.header, *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        rule = ["-" * width for width in widths]
        return "\n".join(
            "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
            for line in [self.header, rule, *self.rows]
        )

    def html(self) -> str:
        """The table as HTML."""
        head = "".join(f"<th>{escape(cell)}</th>" for cell in self.header)
        body = "\n".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in self.rows
        )
        return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"
