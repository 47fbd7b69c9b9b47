"""Checks of a step: any parts, randomness that is not noise, and what cannot be checked."""

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import hush
from hush.audit.noise import ObservedNoise, noise_fresh, noise_law, noise_scale, observe
from hush.audit.run_self_test import influence
from hush.core.parts import Clipping, Noise, Sampling
from hush.core.randomness import Stream
from tests.audit import sabotage
from tests.audit.test_sabotage import STEPS, problem


@pytest.mark.parametrize(
    ("noise", "clipping"),
    [
        (hush.Laplace(multiplier=1.0), hush.Lp(p=1.0, norm=1.0)),
        (hush.GeneralizedGaussian(beta=3.0, multiplier=2.0), hush.L2(norm=1.0)),
        (hush.BlockGaussian(multipliers=(1.0, 2.0)), hush.Subspaces(ranks=(40, 5), l2=(0.5, 1.5))),
        (hush.Gaussian(multiplier=1.0), hush.Box(bounds=((40, 0.1), (5, 0.3)))),
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
        (hush.Poisson(rate=0.5), hush.L2(norm=1.0), DROPPING),
        (hush.Poisson(rate=0.5), hush.Importance(norm=1.0), None),
        (hush.Twice(rate=0.5, coordinate_rate=0.5), hush.L2(norm=1.0), None),
        (hush.Poisson(rate=0.5), hush.L2(norm=1.0), nn.Linear(8, 5).double()),
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


def test_p_values_are_even_where_nothing_is_wrong() -> None:
    """The alarm rate is what is said: 200 p-values of exact laws are evenly spread."""
    rng, values = np.random.default_rng(0), []
    for _ in range(200):
        noise = rng.normal(0, 0.5**0.5, size=(5, 40))
        values.append(noise_scale(ObservedNoise(noise=noise, exponent=2.0)).p_value)
    assert stats.kstest(values, "uniform").pvalue > 1e-3
