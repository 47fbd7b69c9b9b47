"""Numbers, bars and tables as text. Rounded bounds are still bounds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, ROUND_FLOOR, Context


def at_most(value: float, digits: int = 4) -> str:
    """An upper bound, rounded up to a number of significant digits.

    >>> at_most(2.98765), at_most(1.2344e-5), at_most(math.inf)
    ('2.988', '1.235e-5', 'infinite')
    """
    return _rounded(value, digits, ROUND_CEILING)


def at_least(value: float, digits: int = 4) -> str:
    """A lower bound, rounded down to a number of significant digits.

    >>> at_least(2.98765)
    '2.987'
    """
    return _rounded(value, digits, ROUND_FLOOR)


def percent(share: float) -> str:
    """An upper bound on a share, in percent and rounded up to three digits.

    >>> percent(0.58123), percent(1.0)
    ('58.2%', '100%')
    """
    return f"{_rounded(100 * share, 3, ROUND_CEILING)}%"


def _rounded(value: float, digits: int, direction: str) -> str:
    if not math.isfinite(value):
        return "infinite" if value > 0 else "unknown"
    number = Context(prec=digits, rounding=direction).create_decimal(value)
    if number and not -4 < number.adjusted() < 7:
        return f"{number.normalize():e}".replace("e+", "e")
    return f"{number.normalize():f}"


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
