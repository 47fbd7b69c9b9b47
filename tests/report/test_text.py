"""Rounded bounds still are bounds."""

from decimal import Decimal

from hypothesis import given
from hypothesis import strategies as st

from hush.report.text import at_least, at_most, percent

VALUES = st.floats(0, 1e9, allow_nan=False)


@given(VALUES)
def test_a_rounded_bound_is_on_its_side(value: float) -> None:
    exact = Decimal(value)
    assert Decimal(at_least(value)) <= exact <= Decimal(at_most(value))
    assert Decimal(at_most(value)) <= exact * Decimal("1.002")
    assert Decimal(percent(value).removesuffix("%")) >= exact * 100 * (1 - Decimal("1e-15"))


def test_numbers_are_short() -> None:
    assert at_most(1.2344e-5, 3) == "1.24e-5"
    assert at_least(0.012399, 2) == "0.012"
    assert at_most(3.0) == "3"
