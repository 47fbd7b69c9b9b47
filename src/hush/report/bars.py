"""Bars in text: lengths that a terminal shows, in eighths of a character where it can."""

import shutil
import sys
from collections.abc import Sequence

_EIGHTHS = " ▏▎▍▌▋▊▉█"
_LEAST, _MOST, _PIPED = 10, 40, 24


def bars(values: Sequence[float], *, full: float, width: int, blocks: bool) -> list[str]:
    """A bar for each value, `full` being as long as `width`; an arrow ends those that are longer.

    Args:
        values: Not negative; infinite ones are longer than any.
        full: Value of a bar of the whole width.
        width: In characters.
        blocks: Whether the terminal has block characters; else a bar is made of #.

    >>> bars([1.0, 2.0, 9.0], full=2.0, width=4, blocks=False)
    ['##', '####', '###>']
    """
    return [_bar(value / full, width, blocks) for value in values]


def _bar(share: float, width: int, blocks: bool) -> str:
    mark = "█" if blocks else "#"
    if share > 1:
        return mark * (width - 1) + ("▶" if blocks else ">")
    if not blocks:
        return mark * round(share * width)
    whole, rest = divmod(round(share * width * 8), 8)
    return (mark * whole + _EIGHTHS[rest]).rstrip()


def room(beside: int) -> tuple[int, bool]:
    """Width of bars beside so many characters of text on standard output, and whether it has blocks.

    Args:
        beside: Characters of the rest of a row.
    """
    width = _PIPED
    if sys.stdout.isatty():
        width = min(max(shutil.get_terminal_size().columns - beside, _LEAST), _MOST)
    try:
        _EIGHTHS.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return width, False
    return width, True
