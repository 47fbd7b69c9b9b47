"""Records on images: what is public stays so, what is paid is on the ledger, and runs learn."""

import math
from dataclasses import replace

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

import hush
from hush_recipes.dpsur.inputs import Inputs
from hush_recipes.records import images
from hush_recipes.records.basis import unit
from hush_recipes.records.images import Settings, whitened
from hush_recipes.records.protocol import DELTA, Job
from hush_recipes.statistics.moments import NoisyWhitening

RECORDS, CHANNELS = 600, 12
SMALL = Settings(rate=20.0, whitened=5, multiplier=4.0, batch=200, steps=20)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made_up() -> Inputs:
    """Three classes along three channels, beside one channel that all records share."""
    labels = torch.arange(RECORDS) % 3
    x = 0.3 * torch.randn(RECORDS, CHANNELS, generator=seeded(1))
    x[:, 0] += 3.0
    x[torch.arange(RECORDS), 1 + labels] += 1.0
    x = unit(x)[:, :, None]
    return Inputs(classes=3, train=(x, labels), test=(x[:300], labels[:300]))


def test_whitening_is_charged_and_shrinks_what_records_share() -> None:
    inputs, ledger = made_up(), hush.Ledger()
    white = whitened(inputs, SMALL, ledger, seed=0)
    noisy = NoisyWhitening(multiplier=SMALL.multiplier)
    assert ledger.counts == {noisy.plan: 2}

    def shared(x: Tensor) -> float:
        return float(x.mean(0).norm())

    torch.testing.assert_close(white.train[0].flatten(1).norm(dim=1), torch.ones(RECORDS))
    assert shared(white.train[0]) < 0.2 < 0.8 < shared(inputs.train[0])
    assert torch.equal(white.train[0][:300], white.test[0])
    again = whitened(inputs, SMALL, hush.Ledger(), seed=0)
    assert torch.equal(again.train[0], white.train[0])


def test_a_run_spends_its_epsilon_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_inputs", lambda *_: made_up())
    job = Job(data="made-up", held_out=0, settings=SMALL, epsilon=8.0, seed=3, device="cpu")
    outcome = images.run(job)
    assert 7.9 < outcome.epsilon <= 8.0
    assert outcome.accuracy > 0.7
    assert images.run(job) == outcome
    cheaper = images.run(replace(job, settings=replace(SMALL, multiplier=100.0)))
    assert cheaper.multiplier < outcome.multiplier


def test_a_full_batch_costs_what_the_gaussian_mechanism_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_inputs", lambda *_: made_up())
    settings = replace(SMALL, batch=10 * RECORDS)
    job = Job(data="made-up", held_out=0, settings=settings, epsilon=8.0, seed=3, device="cpu")
    outcome = images.run(job)
    # two statistics and the steps are one Gaussian mechanism: its delta at epsilon 8 in closed form
    mu = math.sqrt(2 / settings.multiplier**2 + settings.steps / outcome.multiplier**2)
    delta = norm.cdf(mu / 2 - 8 / mu) - math.exp(8) * norm.cdf(-mu / 2 - 8 / mu)
    assert 0.9 * DELTA < delta <= DELTA
    fewer = images.run(replace(job, settings=replace(settings, batch=RECORDS)))
    assert fewer == outcome, "no more than all records"
