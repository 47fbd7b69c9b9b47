import json
import math
from dataclasses import replace
from typing import Any

import pytest

import hush
from hush.core.errors import InvalidValue, PrivacyWarning
from hush.core.guarantee import check_delta


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


def test_what_weakens_a_guarantee_is_in_its_line() -> None:
    settings: Any = {"epsilon": hush.Bound(lower=1.9, upper=2.0), "delta": 1e-3}
    assert "randomness" not in str(hush.Guarantee(**settings, records=1000))
    assert "delta:" not in str(hush.Guarantee(**settings, records=1000)), "1/n itself is not above"
    weak = hush.Guarantee(**settings, randomness="seeded", records=1001)
    assert "proved, randomness: seeded, delta: above 1/1001, one record of 1001 published" in str(weak)
    assert hush.Guarantee.from_plain(json.loads(json.dumps(weak.to_plain()))) == weak
    assert weak != hush.Guarantee(**settings)


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


@pytest.mark.parametrize("delta", [0.5, 0.9, 1.0])
def test_a_delta_that_a_coin_satisfies_is_refused_everywhere(delta: float) -> None:
    plan = hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    for use in (
        lambda: hush.Budget(epsilon=1.0, delta=delta),
        lambda: hush.epsilon(plan, steps=1, delta=delta),
        lambda: check_delta(delta, records=1),
    ):
        with pytest.raises(
            InvalidValue, match=r"must be a finite number > 0 and < 0\.5.*toss of a coin"
        ):
            use()


def test_a_delta_above_one_over_the_records_is_warned_of() -> None:
    with pytest.warns(PrivacyWarning, match=r"delta=1e-05 is above 1/100000000 = 1e-08: .*e\.g\. 1e-09"):
        assert check_delta(1e-5, records=10**8) == 1e-5
    assert check_delta(1e-5, records=10**5) == 1e-5, "1/n itself is not above"


def test_a_guarantee_as_a_number_is_its_upper_epsilon() -> None:
    stated = hush.Guarantee(epsilon=hush.Bound(lower=0.5, upper=2.0), delta=1e-5)
    assert float(stated) == 2.0
    assert math.isinf(float(replace(stated, epsilon=hush.Bound(lower=1.0, upper=math.inf))))
