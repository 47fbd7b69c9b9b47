"""Bounds as short text, rounded so that the text still is a bound."""

import math
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
