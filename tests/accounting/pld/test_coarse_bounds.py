"""Rough bounds are bounds: against the grid's, which share no more than the masses with them."""

import math
from typing import Any

import pytest
from scipy import stats

from hush.accounting.pld import accountant
from hush.accounting.pld.privacy_loss import Step
from hush.accounting.steps import PairedStep, SampledGaussian, SampledNoise

COUNTS: list[dict[Step, int]] = [
    {SampledGaussian(0.1, 1.0): 100},
    {SampledNoise(1.0, 1.0, 5.0): 10},
    {SampledNoise(0.1, 1.5, 2.0): 30},
    {SampledNoise(0.1, 4.0, 3.0): 5, SampledGaussian(0.2, 2.0): 5},
    {SampledGaussian(0.3, 1.0): 10, SampledNoise(0.01, 1.5, 5.0): 1},
]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("delta", [1e-20, 1e-5, 0.01])
def test_epsilon_is_no_less(counts: dict[Step, int], delta: float) -> None:
    assert (
        accountant.epsilon(counts, delta).lower
        <= accountant.coarse_epsilon_upper(counts, delta)
        < math.inf
    )


@pytest.mark.parametrize("counts", COUNTS)
def test_distance_is_no_less(counts: dict[Step, int], monkeypatch: pytest.MonkeyPatch) -> None:
    distance = accountant.coarse_total_variation(counts)
    # the grid's own answer: `pld.delta` would cut it off at this very distance
    monkeypatch.setattr(accountant, "coarse_total_variation", lambda _: 1.0)
    grid = accountant.delta(counts, 0.0).lower
    assert 0.1 < grid <= distance < 1


@pytest.mark.parametrize(
    ("step", "law"),
    [
        (SampledGaussian(0.1, 1.0), stats.norm(scale=1.0)),
        (SampledGaussian(1.0, 20.0), stats.norm(scale=20.0)),
        (SampledNoise(1.0, 1.0, 5.0), stats.laplace(scale=5.0)),
        (SampledNoise(0.3, 1.5, 2.0), stats.gennorm(1.5, scale=2.0)),
        (SampledNoise(0.1, 4.0, 3.0), stats.gennorm(4.0, scale=3.0)),
    ],
)
def test_distance_of_one_step_is_the_total_variation(step: PairedStep, law: Any) -> None:
    """Symmetric unimodal noise moved by 1: all the mass within half of that around the middle."""
    exact = step.rate * (law.cdf(0.5) - law.cdf(-0.5))
    assert accountant.coarse_total_variation({step: 1}) == pytest.approx(exact, rel=1e-9)
    assert accountant.coarse_total_variation({step: 1}) >= exact * (1 - 1e-13)


@pytest.mark.parametrize("steps", [2, 10, 300])
@pytest.mark.parametrize("multiplier", [2.0, 20.0])
def test_distance_of_gaussians_is_no_less_than_in_closed_form(steps: int, multiplier: float) -> None:
    separation = math.sqrt(steps) / multiplier
    exact = stats.norm.cdf(separation / 2) - stats.norm.cdf(-separation / 2)
    assert exact <= accountant.coarse_total_variation({SampledGaussian(1.0, multiplier): steps}) <= 1


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("epsilon", [1e-3, 0.5, 3.0, 40.0])
def test_least_delta_is_no_more(counts: dict[Step, int], epsilon: float) -> None:
    assert accountant.coarse_delta_lower(counts, epsilon) <= accountant.delta(counts, epsilon).upper
