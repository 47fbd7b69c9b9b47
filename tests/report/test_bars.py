"""Bars in text."""

import io
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hush.report.bars import bars, room


@given(st.lists(st.floats(0, 10), min_size=2, max_size=2), st.integers(2, 40))
def test_a_longer_bar_is_a_larger_value(values: list[float], width: int) -> None:
    small, large = (len(bar) for bar in bars(sorted(values), full=5.0, width=width, blocks=False))
    assert small <= large <= width
    assert small == pytest.approx(min(values) / 5 * width, abs=0.51) or min(values) > 5


def test_bars_have_eighths_and_arrows() -> None:
    assert bars([0.0, 1.0, 1.125, 4.0], full=4.0, width=4, blocks=True) == ["", "█", "█▏", "████"]
    assert bars([4.1, math.inf], full=4.0, width=4, blocks=True) == ["███▶", "███▶"]


def test_what_a_terminal_cannot_show_is_not_asked_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for encoding, blocks in (("utf-8", True), ("ascii", False), ("latin-1", False)):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        assert room(60) == (24, blocks)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert room(60)[0] == 20
    assert room(79)[0] == 10, "it is never too short to be read"
