"""Noise conditioned on acceptance against integration, series and the law of its draws."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from hush_recipes.dpsur.algorithm1 import (
    conditioned_rdp,
    counted_rdp,
    dpsur_algorithm1,
    draw_inside,
    flipped_rdp,
)


def integrated(
    order: float, first: float, second: float, sigma: float, low: float, high: float
) -> float:
    """D_a of two truncated normal laws, by integration of their densities."""
    masses = [stats.norm.cdf(high, t, sigma) - stats.norm.cdf(low, t, sigma) for t in (first, second)]
    constant = masses[0] ** -order * masses[1] ** (order - 1) / (sigma * math.sqrt(2 * math.pi))
    start = max(low, min(first, second, high) - 15 * sigma)
    moment = quad(
        lambda x: math.exp(
            -(order * (x - first) ** 2 + (1 - order) * (x - second) ** 2) / (2 * sigma**2)
        ),
        *(start, min(high, max(first, second) + 15 * sigma)),
        limit=400,
    )[0]
    return math.log(constant * moment) / (order - 1)


@pytest.mark.parametrize(
    ("low", "high"), [(-math.inf, 0.0), (-math.inf, -0.5), (-math.inf, 3.0), (-0.4, 0.9), (1.5, 4.0)]
)
def test_the_cost_of_a_fixed_number_against_integration(low: float, high: float) -> None:
    ends = np.linspace(0, 1, 4)
    for order, sigma in ((1.5, 0.8), (2.0, 1.3), (8.0, 2.0)):
        cost = conditioned_rdp(order, sigma=sigma, low=low, high=high)
        pairs = [integrated(order, t, u, sigma, low, high) for t in ends for u in ends]
        assert max(pairs) == pytest.approx(cost, rel=1e-6)  # the ends of the range are the worst pair
        assert cost < order / (2 * sigma**2)  # Theorem 4.1, for every interval


def test_the_number_of_draws_against_its_series() -> None:
    p, q = (float(stats.norm.cdf((0.5 - t) / 1.3)) for t in (1.0, 0.0))
    n = np.arange(300)
    moment = np.sum((p * (1 - p) ** n) ** 1.5 * (q * (1 - q) ** n) ** -0.5)
    other = np.sum((q * (1 - q) ** n) ** 1.5 * (p * (1 - p) ** n) ** -0.5)
    expected = 2 * math.log(max(moment, other))
    assert counted_rdp(1.5, sigma=1.3, high=0.5) == pytest.approx(expected, rel=1e-6)
    assert counted_rdp(2.0, sigma=1.0, high=0.0) == math.inf


def test_the_draws_have_the_conditioned_law() -> None:
    drawn = np.array(
        [draw_inside(0.6, norm=2.0, sigma=0.7, low=-1.0, high=0.9, seed=k) for k in range(2000)]
    )
    law = stats.truncnorm((-1 - 0.6) / 1.4, (0.9 - 0.6) / 1.4, loc=0.6, scale=1.4)
    assert stats.kstest(drawn, law.cdf).pvalue > 1e-3
    # clamping the noisy number in place of drawing again gives another law
    clamped = np.clip(np.random.default_rng(0).normal(0.6, 1.4, 2000), -1, 0.9)
    assert stats.kstest(clamped, law.cdf).pvalue < 1e-6
    outside = [draw_inside(50.0, norm=2.0, sigma=0.7, high=0.9, seed=k) for k in range(500)]
    clipped = stats.truncnorm(-np.inf, (0.9 - 2.0) / 1.4, loc=2.0, scale=1.4)
    assert stats.kstest(outside, clipped.cdf).pvalue > 1e-3


def test_a_chosen_model_costs_more_than_the_theorem_that_holds_for_a_fixed_number(
    tmp_path: Path,
) -> None:
    assert flipped_rdp(1.5, sigma=0.8, threshold=-1) == pytest.approx(1.5, abs=1e-3)
    figure = dpsur_algorithm1()
    for noise, threshold, published, fixed, counted, chosen in figure.rows:
        assert float(str(fixed)) < float(str(published)) < float(str(counted)), (noise, threshold)
        if float(str(threshold)) < 0:  # the paper's is -1
            assert float(str(chosen)) > float(str(published)), (noise, threshold)
    assert all(path.exists() for path in figure.save(tmp_path))
