"""`hush compare`: its table; the mechanisms themselves are in tests/accounting/test_compare.py."""

import math

from hush.accounting.compare import Row
from hush.cli.questions.compare import _table


def row(mechanism: str, deviation: float, cost: float) -> Row:
    return Row(
        mechanism=mechanism,
        accountant="PLD",
        deviation=deviation,
        published=None,
        variance=deviation**2,
        signal_to_noise=1 / deviation,
        cost=cost,
    )


def test_a_bar_is_as_long_as_the_noise() -> None:
    rows = [row("shaped", 1.0, 0.25), row("plain", 2.0, 1.0), row("none", math.inf, math.inf)]
    lines = _table(rows).markdown().splitlines()[2:]
    half, plain, endless = (line.split(" | ")[2].strip() for line in lines)
    assert len(plain) == 2 * len(half) == 6, "a quarter of 24: the longest is 4 times plain"
    assert len(endless) == 24
    assert endless[-1] in ">▶"
