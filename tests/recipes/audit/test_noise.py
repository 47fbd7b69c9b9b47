"""Checks of a step with any parts; p-values are valid, and see what depends on what."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import hush
from hush.core.parts import Clipping, Noise, Sampling
from hush.core.randomness import Stream
from hush_recipes.audit import draws
from hush_recipes.audit.noise import ObservedNoise, noise_fresh, noise_law, noise_scale, observe
from hush_recipes.audit.self_test import influence
from tests.recipes.audit import sabotage
from tests.recipes.audit.test_sabotage import STEPS, problem


@pytest.mark.parametrize(
    ("noise", "clipping"),
    [
        (hush.Laplace(1.0), hush.Lp(p=1.0, norm=1.0)),
        (hush.GeneralizedGaussian(beta=3.0, multiplier=2.0), hush.L2(1.0)),
        (hush.BlockGaussian(multipliers=(1.0, 2.0)), hush.Subspaces(ranks=(40, 5), l2=(0.5, 1.5))),
        (hush.Gaussian(1.0), hush.Box(bounds=((40, 0.1), (5, 0.3)))),
    ],
    ids=lambda part: type(part).__name__,
)
def test_other_noise_and_clipping_pass_and_fail_alike(
    noise: Noise, clipping: Clipping, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, data = problem(noise=noise, clipping=clipping)
    observed = observe(step, data, STEPS // 2)
    for check in (check(observed) for check in (noise_scale, noise_law, noise_fresh)):
        assert check.passed, check
    assert influence(step, next(step.batches(data)), places=(1,)).passed
    sabotage.noise_per_rank(monkeypatch)
    step, data = problem(noise=noise, clipping=clipping)
    assert not noise_scale(observe(step, data, STEPS // 2)).passed


DROPPING = nn.Sequential(nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 5))


@pytest.mark.parametrize(
    ("sampling", "clipping", "model"),
    [
        (hush.Poisson(0.5), hush.L2(1.0), DROPPING),
        (hush.Poisson(0.5), hush.Importance(1.0), None),
        (hush.Twice(rate=0.5, coordinate_rate=0.5), hush.L2(1.0), None),
        (hush.Poisson(0.5), hush.L2(1.0), nn.Linear(8, 5).double()),
    ],
    ids=["dropout", "coins", "masks", "double precision"],
)
def test_dropout_coins_and_masks_are_those_of_the_step(
    sampling: Sampling, clipping: Clipping, model: nn.Module | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step draws at random beside its noise is drawn again, not taken for noise or influence."""
    step, data = problem(clipping=clipping, sampling=sampling, model=model)
    assert noise_scale(observe(step, data, 4)).passed
    batch = next(step.batches(data))
    assert isinstance(step.generator, Stream)
    state = step.generator.get_state()
    assert influence(step, batch, places=(0,)).passed
    assert torch.equal(step.generator.get_state(), state)
    step(batch)
    sabotage.a_quarter_of_the_noise(monkeypatch)
    assert not noise_scale(observe(step, data, 4)).passed


TIMES = 200


def scale(noise: np.ndarray) -> float:
    return noise_scale(ObservedNoise(noise=noise, exponent=2.0)).p_value


def repeats(noise: np.ndarray) -> float:
    return noise_fresh(ObservedNoise(noise=noise, exponent=2.0)).p_value


@pytest.mark.parametrize(
    "p_value",
    [
        lambda rng: repeats(rng.normal(size=(4, 30))),
        lambda rng: scale(rng.normal(0, 0.5**0.5, size=(5, 40))),
        lambda rng: draws.joint_draws(rng.random((30, 17)) < 0.3, 0.3),
        lambda rng: draws.sizes(rng.binomial(40, 0.3, size=50).astype(float), 40, 0.3),
    ],
    ids=["repeats", "scale", "joint draws", "sizes"],
)
def test_small_p_values_are_as_rare_as_they_say(p_value: object) -> None:
    rng = np.random.default_rng(0)
    values = np.array([p_value(rng) for _ in range(TIMES)])  # type: ignore[operator]
    for level in (0.01, 0.1):
        limit = stats.binom(TIMES, level).isf(1e-6)
        assert (values <= level).sum() <= limit
    assert values.min() > 0


@pytest.mark.parametrize(("steps", "numbers"), [(1, 0), (0, 7), (3, 5), (2, -5)])
def test_noise_that_repeats_is_seen_at_any_distance(steps: int, numbers: int) -> None:
    noise = np.random.default_rng(1).normal(size=(8, 60))
    assert repeats(noise) > 1e-6
    low, high = max(0, numbers), 60 + min(0, numbers)
    for row in range(steps, 8):
        for start in range(low, high):  # in order, so that copies of copies repeat as well
            noise[row, start] = noise[row - steps, start - numbers]
    assert repeats(noise) < 1e-6


def test_agreement_counts_are_those_of_a_plain_loop() -> None:
    """A single pair of rows: the p-value is that of the distance that stands out, corrected."""
    rng = np.random.default_rng(2)
    noise = rng.normal(size=(2, 9))
    signs = np.sign(noise)
    expected = []
    for steps in (0, 1):
        for lag in range(-8 if steps else 1, 9):
            left = signs[: 2 - steps, max(0, -lag) : 9 - max(0, lag)]
            right = signs[steps:, max(0, lag) : 9 + min(0, lag)]
            agree = int((left == right).sum())
            law = stats.binom(left.size, 0.5)
            expected.append(min(1.0, 2 * min(law.cdf(agree), law.sf(agree - 1))))
    assert repeats(noise) == pytest.approx(min(1.0, len(expected) * min(expected)))
