"""The lower end for sampled coordinates, against the exact law of the sum that it looks at."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from hush.accounting.numerics import Array
from hush.accounting.steps import dominated_gaussian
from hush.core.parts import SensitivitySet


def true_errors(levels: Array, count: int, cap: float, rate: float, coordinate_rate: float) -> Array:
    """The miss rate at each false alarm rate of the tests {sum > t}, under unit noise a coordinate."""
    spread = math.sqrt(count)
    threshold = spread * norm.isf(levels)
    numbers = np.arange(count + 1)
    missed = norm.cdf((threshold[:, None] - cap * numbers) / spread) @ binom.pmf(
        numbers, count, coordinate_rate
    )
    return np.asarray((1 - rate) * (1 - levels) + rate * missed)


def plain_errors(levels: Array, rate: float, multiplier: float) -> Array:
    return np.asarray((1 - rate) * (1 - levels) + rate * norm.cdf(norm.isf(levels) - 1 / multiplier))


@pytest.mark.parametrize("count", [1, 7, 100, 10_000])
@pytest.mark.parametrize("coordinate_rate", [1 / 256, 1 / 3, 255 / 256])
@pytest.mark.parametrize("length", [0.3, 3.0])
def test_the_plain_step_shows_no_more(count: int, coordinate_rate: float, length: float) -> None:
    cap, rate = length / math.sqrt(count), 0.2
    ball = SensitivitySet(p=2, norm=length, cap=cap, dimension=count)
    dominated_rate, multiplier = dominated_gaussian(((ball, 1.0),), rate, coordinate_rate)
    levels = np.logspace(-12, -1e-6, 400)
    if multiplier == pytest.approx(1 / cap):
        # one coordinate: the plain step itself
        assert dominated_rate == pytest.approx(rate * coordinate_rate)
        return
    exact = true_errors(levels, count, cap, rate, coordinate_rate)
    assert (plain_errors(levels, dominated_rate, multiplier) >= exact - 1e-12).all()
    # as if all coordinates took part: more than there is to see
    assert (plain_errors(levels, rate, 1 / length) < exact - 1e-6).any()


def test_many_small_coordinates_show_nearly_what_their_mean_does() -> None:
    ball = SensitivitySet(p=2, norm=1.0, cap=1e-3, dimension=1_000_000)
    dominated_rate, multiplier = dominated_gaussian(((ball, 1.0),), 1.0, 0.5)
    assert dominated_rate > 0.99
    assert multiplier == pytest.approx(2.0, rel=0.01)


def test_a_change_below_the_cap_is_spread_over_all_coordinates_there_are() -> None:
    ball = SensitivitySet(p=2, norm=1.0, cap=0.5, dimension=2500)
    dominated_rate, multiplier = dominated_gaussian(((ball, 1.0),), 0.2, 1 / 3)
    levels = np.logspace(-12, -1e-6, 400)
    exact = true_errors(levels, 2500, 0.02, 0.2, 1 / 3)
    assert (plain_errors(levels, dominated_rate, multiplier) >= exact - 1e-12).all()
    # all of four entries at the cap are taken along in one draw of 81 only
    at_the_cap = true_errors(levels, 4, 0.5, 0.2, 1 / 3)
    assert (plain_errors(levels, dominated_rate, multiplier) < at_the_cap).any()


def test_several_blocks_are_weighed_by_their_noise() -> None:
    blocks = (
        (SensitivitySet(p=2, norm=2.0, cap=0.1, dimension=10**6), 3.0),
        (SensitivitySet(p=2, norm=1.0, cap=0.1, dimension=10**6), 0.5),
    )
    dominated_rate, multiplier = dominated_gaussian(blocks, 0.2, 0.5)
    # nearly the mean of all coordinates together, and never more
    whole = 1 / (0.5 * math.hypot(2 / 3, 2.0))
    assert whole <= multiplier <= 1.01 * whole
    assert 0.19 < dominated_rate <= 0.2
