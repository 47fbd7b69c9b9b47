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
from hush_recipes.records.images import Settings, side_by_side, whitened, with_products
from hush_recipes.records.protocol import DELTA, Job, Outcome
from hush_recipes.registry import all_recipes

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
    noisy = hush.NoisyWhitening(multiplier=SMALL.multiplier)
    assert ledger.counts == {noisy.plan: 2}

    def shared(x: Tensor) -> float:
        return float(x.mean(0).norm())

    torch.testing.assert_close(white.train[0].flatten(1).norm(dim=1), torch.ones(RECORDS))
    assert shared(white.train[0]) < 0.2 < 0.8 < shared(inputs.train[0])
    assert torch.equal(white.train[0][:300], white.test[0])
    again = whitened(inputs, SMALL, hush.Ledger(), seed=0)
    assert torch.equal(again.train[0], white.train[0])


@pytest.mark.parametrize("places", [1, 4])
def test_the_norms_of_the_statistics_cut_nothing_off(places: int) -> None:
    """Records of length 1 whose places are all alike have the longest mean outer products."""
    x = unit(made_up().train[0].expand(-1, -1, places).clone())
    noisy = hush.NoisyWhitening(multiplier=1.0, square_norm=1 / places)
    (_, first), (_, second) = noisy.clipped_sums(x)
    flat = x.double().mean(2)
    torch.testing.assert_close(first.view(CHANNELS, places), x.double().sum(0), rtol=1e-5, atol=0)
    torch.testing.assert_close(second, flat.T @ flat, rtol=1e-5, atol=1e-5)


def test_features_side_by_side_keep_length_and_order() -> None:
    first, second = (unit(torch.randn(5, 4, 1, generator=seeded(seed))) for seed in (1, 2))
    joined = side_by_side([first, second])
    torch.testing.assert_close(joined.flatten(1).norm(dim=1), torch.ones(5))
    torch.testing.assert_close(joined[:, ::2] * 2**0.5, first)
    torch.testing.assert_close(joined[:, 1::2] * 2**0.5, second)
    assert side_by_side([first]) is first


def test_products_of_leading_inputs_are_a_record_s_own_and_keep_its_length() -> None:
    inputs, settings = made_up(), replace(SMALL, multiplied=3, share=0.25)
    wide = with_products(inputs, settings)
    x, (row, *_) = inputs.train[0][:, :, 0], wide.train[0][:, :, 0]
    torch.testing.assert_close(wide.train[0].flatten(1).norm(dim=1), torch.ones(RECORDS))
    a, b, c = (float(value) for value in x[0, :3])
    products = torch.tensor([a * a, a * b, a * c, b * b, b * c, c * c])
    torch.testing.assert_close(row, torch.cat([0.75**0.5 * x[0], 0.5 * products / products.norm()]))
    alone = with_products(replace(inputs, train=(inputs.train[0][:1], inputs.train[1])), settings)
    assert torch.equal(alone.train[0][0], wide.train[0][0])
    assert torch.equal(wide.train[0][:300], wide.test[0])
    assert with_products(inputs, SMALL) is inputs


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


@pytest.mark.parametrize("data", ["fashion-mnist", "mnist", "cifar10"])
def test_candidates_are_the_chosen_settings_and_others(
    data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job[Settings]] = []

    def run(job: Job[Settings]) -> Outcome:
        jobs.append(job)
        return Outcome(accuracy=0.5, epsilon=job.epsilon, multiplier=1.0)

    monkeypatch.setattr(images, "run", run)
    recipes = all_recipes()
    last = recipes[f"records-{data}"](seeds=1, processes=1)
    assert [row[0] for row in last.rows] == list(images.CHOSEN[data])
    chosen = [(job.epsilon, job.settings) for job in jobs]
    assert {job.held_out for job in jobs} == {0}
    jobs.clear()
    recipes[f"records-{data}-search"](seeds=1, processes=1)
    tried = [(job.epsilon, job.settings) for job in jobs]
    assert {job.held_out for job in jobs} == {images.HELD_OUT[data]}
    assert all(tried.count(pair) == 1 for pair in chosen)
    assert len(tried) == len(set(tried))
    # what is a candidate at one epsilon may be chosen at another, and is asked for by one name
    names = [set(images._candidates(data, settings)) for settings in images.CHOSEN[data].values()]
    for name in set.union(*names):
        jobs.clear()
        recipes[f"records-{data}-search"](seeds=1, processes=1, only=name)
        assert len(jobs) == sum(name in named for named in names)
