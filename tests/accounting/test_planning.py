"""Batch size and steps by public numbers: costs, the progress of a noisy run, and the choice."""

import math

import numpy as np
import pytest

import hush
from hush.accounting.planning import Point, best, curve, low_snr_warning
from hush.core.errors import InvalidValue

BUDGET = hush.Budget(epsilon=3.0, delta=1e-5)


def points(parameters: int = 10_000, epsilon: float = 3.0, gradients: int = 100_000) -> list[Point]:
    budget = hush.Budget(epsilon=epsilon, delta=1e-5)
    return curve(records=10_000, parameters=parameters, budget=budget, gradients=gradients)


def test_every_point_computes_the_gradients_and_spends_the_budget() -> None:
    found = points()
    assert [point.batch for point in found] == [*(2**k for k in range(4, 14)), 10_000]
    for point in found:
        assert point.plan.sampling.expected(10_000) == pytest.approx(point.batch)
        assert point.steps * point.batch == pytest.approx(100_000, rel=0.05)
        assert 2.99 < hush.epsilon(point.plan, point.steps, 1e-5).epsilon.upper <= 3.0
    assert [point.noise for point in found] == sorted((point.noise for point in found), reverse=True)


def test_a_noisy_run_makes_the_progress_that_is_promised() -> None:
    """Noisy SGD on |x|, at the best rate for its noise, against SGD without noise for fewer steps."""
    draw, size, steps, noise = np.random.default_rng(0), 40, 4000, 0.3

    def loss(steps: int, noise: float) -> float:
        start = np.ones(size) / math.sqrt(size)  # at distance 1
        rate = 1 / math.sqrt(steps * (1 + size * noise**2))
        average, x = np.zeros(size), start.copy()
        for _ in range(steps):
            gradient = x / max(float(np.linalg.norm(x)), 1e-12)
            x = x - rate * (gradient + noise * draw.standard_normal(size))
            average += x / steps
        return float(np.linalg.norm(average))

    effective = steps / (1 + size * noise**2)
    assert loss(steps, noise) <= 1 / math.sqrt(effective), "the bound for this number of steps"
    assert loss(steps, noise) > loss(steps, 0.0)


def test_larger_models_and_smaller_budgets_want_larger_batches() -> None:
    batch = best(points()).batch
    assert best(points(parameters=1_000_000)).batch > batch
    assert best(points(epsilon=0.3)).batch > batch
    most = max(point.effective for point in points())
    assert best(points()).effective >= 0.8 * most


def test_limits_below_the_data_and_wrong_numbers() -> None:
    found = points(gradients=500)
    assert found[-1].batch == 500
    assert found[-1].steps == 1
    with pytest.raises(InvalidValue, match="gradients"):
        points(gradients=0)


def test_the_warning_follows_from_public_numbers() -> None:
    plan = hush.plans.dpsgd(rate=0.01, multiplier=1.0)
    # 100 records of 10,000; the noise of 100 steps on d parameters has norm 10 sqrt(d)
    assert low_snr_warning(plan, 10_000, 100, 10**6) is None
    low = low_snr_warning(plan, 10_000, 100, 4 * 10**6)
    assert low is not None
    assert "is 0.5 times the noise" in low
