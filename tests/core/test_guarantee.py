import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hush
from hush.audit.lower_bound import epsilon_lower
from hush.core.errors import InvalidValue, PrivacyWarning
from hush.core.guarantee import Adjacency, at_least, at_most, check_delta, percent


def test_a_guarantee_prints_everything_in_one_line() -> None:
    text = str(hush.Guarantee(epsilon=hush.Bound(lower=1.9, upper=2.0), delta=1e-5))
    assert "\n" not in text
    for part in ("<= 2 (and", ">= 1.9)", "1e-05", "dp", "zero-out", "one record", "proved"):
        assert part in text
    assert "publishable" in text
    sensitive = hush.Guarantee(
        epsilon=hush.Bound(lower=0, upper=1), delta=1e-5, notion="per-instance", sensitive=True
    )
    assert "do not publish" in str(sensitive)
    claim = hush.Guarantee(epsilon=hush.Bound(lower=0, upper=1), delta=1e-5, basis="published")
    assert str(claim).startswith("epsilon 1 at delta 1e-05 (dp")
    assert "as its paper claims, not proved, publishable" in str(claim)


VALUES = st.floats(0, 1e9, allow_nan=False)


@given(VALUES)
def test_a_rounded_bound_is_on_its_side(value: float) -> None:
    assert float(at_least(value)) <= value <= float(at_most(value))
    assert float(at_most(value)) <= value * 1.002
    assert float(percent(value).removesuffix("%")) >= value * 100 * (1 - 1e-15)
    upper, lower, *_ = [*re.findall(r"\d[\d.e-]*", str(hush.Bound(lower=value, upper=value))), "0"]
    assert float(lower) <= value <= float(upper)


def test_numbers_are_short() -> None:
    assert at_most(1.2344e-5, 3) == "1.24e-5"
    assert at_least(0.012399, 2) == "0.012"
    assert (at_most(3.0), at_least(1.9)) == ("3", "1.9")


def test_what_weakens_a_guarantee_is_in_its_line() -> None:
    settings: Any = {"epsilon": hush.Bound(lower=1.9, upper=2.0), "delta": 1e-3}
    assert "randomness" not in str(hush.Guarantee(**settings, records=1000))
    assert "delta:" not in str(hush.Guarantee(**settings, records=1000)), "1/n itself is not above"
    weak = hush.Guarantee(
        **settings, randomness="seeded", records=1001, neighbours=hush.Neighbours.REPLACE
    )
    assert "proved, randomness: seeded, delta: above 1/1001, which permits publishing" in str(weak)
    assert "one record of 1001" in str(weak)
    assert hush.Guarantee.from_plain(json.loads(json.dumps(weak.to_plain()))) == weak
    assert weak != hush.Guarantee(**settings)


@pytest.mark.parametrize("delta", [0.2, 0.1000001, 0.5, 1.0])
def test_a_delta_above_a_tenth_is_refused_everywhere(delta: float) -> None:
    plan = hush.Plan(sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
    for use in (
        lambda: hush.Budget(epsilon=1.0, delta=delta),
        lambda: hush.epsilon(plan, steps=1, delta=delta),
        lambda: hush.Ledger().epsilon(delta),
        lambda: hush.Ledger().store_delta(delta),
        lambda: hush.mean([[1.0]], plan, delta=delta),
        lambda: epsilon_lower(9, 10, 1, 10, delta, 0.95),
        lambda: check_delta(delta, records=1),
    ):
        with pytest.raises(
            InvalidValue,
            match=rf"delta={delta!r} must be a finite number > 0 and <= 0\.1: .*publishing all records "
            r"with probability 0\.1.*well below one over the number of records.*Pass e\.g\. delta=1e-05",
        ):
            use()
    assert hush.Budget(epsilon=1.0, delta=0.1).delta == 0.1


@pytest.mark.parametrize(
    ("adjacency", "one"),
    [
        (Adjacency(), "one record"),
        (Adjacency(per_unit=3), "all data of one user"),
        (Adjacency(group=5), "one record"),
        (Adjacency(per_unit=3, group=5), "all data of one user"),
    ],
    ids=str,
)
def test_a_delta_is_compared_with_one_unit_published_at_random(adjacency: Adjacency, one: str) -> None:
    """One of 240 units, published at random, is among 5 of them with probability 5/240."""
    unit, group, noun = adjacency.unit, adjacency.group, one.split()[-1]
    share, together = f"{group / 240:.2g}", f", for {group} of them together" * (group > 1)
    with pytest.warns(
        PrivacyWarning,
        match=rf"delta=0\.05 is above {group}/240 = {share}: publishing {one} of the 240 {noun}s "
        rf"outright, drawn at random, would satisfy it at epsilon 0{together}\. .*e\.g\. 0\.0004",
    ):
        assert check_delta(0.05, 240, unit) == 0.05
    assert check_delta(group / 240, 240, unit) == group / 240, "1/n itself is not above"
    stated = hush.Guarantee(epsilon=hush.Bound(lower=1, upper=2), delta=0.05, unit=unit, records=240)
    assert f"delta: above {group}/240, which permits publishing one {noun} of 240" in str(stated)
    assert "published" not in str(replace(stated, delta=group / 240))


def test_a_warning_that_follows_a_private_number_is_marked() -> None:
    with pytest.warns(PrivacyWarning, match="depends on a private number: do not publish it"):
        check_delta(0.01, 400, private=True)


def test_an_unknown_lower_bound_is_not_printed_as_zero() -> None:
    assert str(hush.Bound(lower=0.0, upper=1.0)) == "<= 1 (no lower bound)"
    assert str(hush.Bound(lower=0.9, upper=1.0)) == "<= 1 (and >= 0.9)"
