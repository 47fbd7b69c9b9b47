"""The Gaussian without sampling, against 60-digit arithmetic."""

import math

import mpmath as mp
import pytest

from hush.accounting.pld import analytic_gaussian


def exact(separation: float, epsilon: float) -> mp.mpf:
    with mp.workdps(60):
        m, e = mp.mpf(separation), mp.mpf(epsilon)
        return mp.ncdf(m / 2 - e / m) - mp.exp(e) * mp.ncdf(-m / 2 - e / m)


@pytest.mark.parametrize(
    ("separation", "epsilon"),
    [
        (1e-8, 1e-9),
        (1e-3, 3e-2),
        (0.0999, 1.0),
        (0.1001, 1.0),
        (1.0, 3.0),
        (1.0, 0.0),
        (2.236, 11.48),
        (30.0, 700.0),
        (1e3, 505_000.0),
    ],
)
def test_both_bounds_hold_and_are_tight(separation: float, epsilon: float) -> None:
    truth = exact(separation, epsilon)
    bound = analytic_gaussian.delta(separation, epsilon)
    assert bound.lower <= truth <= bound.upper
    assert bound.upper <= bound.lower * (1 + 1e-9)
    back = analytic_gaussian.epsilon(separation, float(truth))
    assert back.lower <= epsilon * (1 + 1e-15)
    assert back.upper >= epsilon * (1 - 1e-15)
    assert back.upper - back.lower <= 1e-9 * max(epsilon, separation)


@pytest.mark.parametrize("delta", [1e-300, 1e-30, 1e-5, 0.5, 1 - 1e-9])
@pytest.mark.parametrize("separation", [0.0, 1e-200, 1e-3, 1.0, 1e10, 1e100, 1e300, math.inf])
def test_extremes(separation: float, delta: float) -> None:
    bound = analytic_gaussian.epsilon(separation, delta)
    assert 0 <= bound.lower <= bound.upper
    if separation >= 1e300:
        assert bound.lower > 1e299
