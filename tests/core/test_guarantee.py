import json
import math

import pytest

import hush
from hush.core.errors import InvalidValue


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


def test_a_claim_is_not_called_published_and_publishable() -> None:
    claim = hush.Guarantee(epsilon=hush.Bound(lower=0, upper=1), delta=1e-5, basis="published")
    assert "as its paper claims it and not proved, publishable" in str(claim)


def test_plain_data_gives_the_same_guarantee_back() -> None:
    guarantee = hush.Guarantee(
        epsilon=hush.Bound(lower=1, upper=2), delta=1e-5, neighbours=hush.Neighbours.REPLACE
    )
    plain = json.loads(json.dumps(guarantee.to_plain()))
    assert hush.Guarantee.from_plain(plain) == guarantee


@pytest.mark.parametrize(("lower", "upper"), [(2, 1), (-1, 1), (math.nan, 1), (0, math.nan)])
def test_a_bound_has_its_ends_in_order(lower: float, upper: float) -> None:
    with pytest.raises(InvalidValue):
        hush.Bound(lower=lower, upper=upper)


def test_an_infinite_bound_says_so() -> None:
    assert str(hush.Bound(lower=math.inf, upper=math.inf)) == "infinite"
    assert str(hush.Bound(lower=3.0, upper=math.inf)) == ">= 3"
