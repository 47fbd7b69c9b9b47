"""Sampled losses and certified distributions share no code: each is the other's oracle."""

import math

import pytest

from hush.accounting.pld import accountant
from hush.accounting.steps import SampledGaussian, SampledNoise
from tests.accounting.pld import monte_carlo

CASES = [
    ({SampledNoise(1.0, 1.0, 2.0): 1}, 1e-2),
    ({SampledNoise(1.0, 1.5, 1.5): 3}, 1e-3),
    ({SampledNoise(0.2, 2.33, 1.5): 20}, 1e-3),
    ({SampledNoise(0.1, 4.0, 1.2): 30}, 1e-3),
    ({SampledGaussian(0.2, 0.8): 20}, 1e-3),
    ({SampledGaussian(0.2, 0.8): 5, SampledNoise(0.3, 3.0, 1.5): 5}, 1e-3),
]


@pytest.mark.parametrize(("counts", "delta"), CASES)
def test_the_certified_epsilon_lies_in_the_band(
    counts: dict[SampledNoise | SampledGaussian, int], delta: float
) -> None:
    band = monte_carlo.epsilon(counts, delta, samples=200_000)
    exact = accountant.epsilon(counts, delta)
    assert band.lower <= exact.upper
    assert exact.lower <= band.upper
    assert band.lower <= band.estimate <= band.upper
    # narrow enough to tell a wrong number
    assert band.upper - band.lower < 0.25 * exact.upper
    assert band.estimate == pytest.approx(exact.upper, rel=0.06)


def test_a_mechanism_with_less_noise_is_outside_the_band() -> None:
    claimed, run = SampledNoise(0.2, 2.33, 1.5), SampledNoise(0.2, 2.33, 1.3)
    band = monte_carlo.epsilon({run: 20}, 1e-2, samples=200_000)
    assert accountant.epsilon({claimed: 20}, 1e-2).upper < band.lower


def test_one_direction_is_not_enough() -> None:
    # The band is of the worse direction: removing a record, under sampling.
    step = SampledNoise(0.05, 2.0, 0.8)
    band = monte_carlo.epsilon({step: 1}, 1e-3, samples=200_000)
    assert band.lower <= accountant.epsilon({step: 1}, 1e-3).upper
    assert accountant.epsilon({step: 1}, 1e-3).lower <= band.upper


def test_what_a_sample_has_not_seen_is_not_known() -> None:
    band = monte_carlo.epsilon({SampledGaussian(1.0, 1.0): 1}, 1e-7, samples=10_000)
    assert band.upper == math.inf
    assert band.estimate < accountant.epsilon({SampledGaussian(1.0, 1.0): 1}, 1e-7).lower
