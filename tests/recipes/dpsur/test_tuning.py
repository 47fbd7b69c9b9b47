"""The tuner: its plans fit the budget, and its model of a test is what a simulated test does."""

import math
from typing import Any

import numpy as np
import pytest

import hush
from hush_recipes.dpsur.tuning import SelectiveTuning, tune_selective

START = hush.Plan(sampling=hush.Poisson(2048 / 60_000), clipping=hush.L2(1.0), noise=hush.Gaussian(1.0))
BUDGET = hush.Budget(epsilon=1.0, delta=1e-5)


def tuned(test: Any, **settings: float) -> SelectiveTuning:
    return tune_selective(START, records=60_000, budget=BUDGET, updates=600, test=test, **settings)


def noise(tuning: SelectiveTuning) -> float:
    assert isinstance(tuning.plan.noise, hush.Gaussian)
    return tuning.plan.noise.multiplier


def accepted(tuning: SelectiveTuning, signal: float) -> tuple[float, float]:
    """How often helpful and harmful proposals pass the plan's test, by simulation."""
    release = tuning.plan.release
    assert isinstance(release, hush.Selective)
    size, repeats = round(release.rate * 60_000), 4000
    generator = np.random.default_rng(0)
    shares = []
    for side in (-1, 1):
        if release.test == "summed":  # changes of one clip up or down, with the right mean
            drawn = generator.poisson(size, repeats)
            number = 2 * generator.binomial(drawn, (1 + side * signal) / 2) - drawn
            deviation = release.multiplier
        else:
            mean = side * signal + generator.normal(size=repeats) / math.sqrt(size)
            number = np.sign(mean)
            deviation = 2 * release.multiplier
        noisy = number + deviation * generator.normal(size=repeats)
        shares.append(float((noisy < release.threshold).mean()))
    return shares[0], shares[1]


@pytest.mark.parametrize("test", ["summed", "mean"])
def test_the_plan_fits_the_budget_and_does_what_is_said(test: str) -> None:
    tuning = tuned(test)
    assert tuning.trials == 1200
    assert tuning.guarantee == hush.epsilon(tuning.plan, steps=1200, delta=1e-5)
    assert 0.998 <= tuning.guarantee.epsilon.upper <= 1.0
    assert tuning.helpful >= 2 * tuning.harmful
    assert (tuning.helpful + tuning.harmful) / 2 == pytest.approx(0.5, abs=1e-3)
    assert accepted(tuning, 0.1) == pytest.approx((tuning.helpful, tuning.harmful), abs=0.03)


def test_at_equal_epsilon_and_power_the_summed_test_leaves_less_training_noise() -> None:
    plain = hush.calibrate(START, BUDGET, steps=1200)
    assert isinstance(plain.noise, hush.Gaussian)
    summed, mean = noise(tuned("summed")), noise(tuned("mean"))
    assert 0.998 * plain.noise.multiplier <= summed < 1.03 * plain.noise.multiplier
    assert mean > 1.2 * summed
