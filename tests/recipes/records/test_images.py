"""Records on images: what is public stays so, what is paid is on the ledger, and runs learn."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import hush
from recipes.dpsur.inputs import Inputs
from recipes.records import images
from recipes.records.drawings import Draw, shapes, strokes
from recipes.records.images import Features, Settings, principal_scaling, public_inputs, unit, whitened
from recipes.records.protocol import Job, Outcome
from recipes.registry import all_recipes

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


@pytest.mark.parametrize("draw", [shapes, strokes])
def test_drawings_are_images_that_a_seed_repeats(draw: Draw) -> None:
    drawn = torch.stack(draw(20, seeded()))
    assert drawn.shape == (2, 20, 1, 28, 28)
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) <= 1
    assert bool((drawn.flatten(2).std(2) > 0.05).all())  # none is empty
    assert torch.equal(drawn, torch.stack(draw(20, seeded())))
    assert not torch.equal(drawn, torch.stack(draw(20, seeded(1))))
    first, second = drawn
    # one thing twice: closer than two things, and not the same
    assert (
        0 < float((first - second).square().mean()) < float((first - second.roll(1, 0)).square().mean())
    )


def test_with_an_exponent_of_a_half_the_drawn_directions_are_white() -> None:
    mixing = torch.randn(6, 6, generator=seeded(2))
    first, second = torch.randn(2, 400, 6, generator=seeded(3)) @ mixing + 5.0
    rows = torch.cat([first, second])
    mean, basis = principal_scaling(first, second, Features(exponent=0.5, floor=0.0, directions=4))
    white = (rows - mean) @ basis
    torch.testing.assert_close(white.T @ white / 800, torch.eye(4), atol=1e-3, rtol=0)
    # the four that were kept are those of the largest variance
    singular = torch.linalg.svdvals(rows - rows.mean(0))
    torch.testing.assert_close(basis.norm(dim=0) ** -2, singular[:4] ** 2 / 800, rtol=1e-3, atol=0)
    within = Features(exponent=0.5, floor=0.0, directions=6, between=0.0)
    _, basis = principal_scaling(first, second, within)
    differences = (first - second) @ basis
    torch.testing.assert_close(differences.T @ differences / 800, torch.eye(6), atol=1e-3, rtol=0)


@pytest.mark.parametrize("directions", [0, 9])
def test_inputs_are_functions_of_one_record_and_have_length_one(directions: int) -> None:
    features = Features(directions=directions)
    records = torch.rand(30, 27, 2, 2, generator=seeded(1))
    drawn = torch.rand(2, 50, 27, 2, 2, generator=seeded(2))
    basis = (drawn[0], drawn[1]) if directions else None
    (both,) = public_inputs([records], basis, features)
    (alone,) = public_inputs([records[7:8]], basis, features)
    assert both.shape == ((30, 9, 1) if directions else (30, 27, 4))
    torch.testing.assert_close(both[7:8], alone)
    torch.testing.assert_close(both.flatten(1).norm(dim=1), torch.ones(30))


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


def test_a_run_spends_its_epsilon_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_inputs", lambda *_: made_up())
    job = Job(data="made-up", held_out=0, settings=SMALL, epsilon=8.0, seed=3, device="cpu")
    outcome = images.run(job)
    assert 7.9 < outcome.epsilon <= 8.0
    assert outcome.accuracy > 0.7
    assert images.run(job) == outcome
    cheaper = images.run(replace(job, settings=replace(SMALL, multiplier=100.0)))
    assert cheaper.multiplier < outcome.multiplier


@pytest.mark.parametrize("data", ["fashion-mnist", "mnist"])
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
    assert [row[0] for row in last.rows] == [1.0, 3.0]
    chosen = [(job.epsilon, job.settings) for job in jobs]
    assert {job.held_out for job in jobs} == {0}
    jobs.clear()
    recipes[f"records-{data}-search"](seeds=1, processes=1)
    tried = [(job.epsilon, job.settings) for job in jobs]
    assert {job.held_out for job in jobs} == {images.HELD_OUT}
    assert all(tried.count(pair) == 1 for pair in chosen)
    assert len(tried) == len(set(tried))
