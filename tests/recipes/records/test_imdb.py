"""The record on IMDB, on a few made-up reviews."""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hush.accounting.epsilon import epsilon
from hush.clipping import L2
from hush.core.plan import Plan
from hush.data import Dataset
from hush.gradients.rules.embedding import RowFactors
from hush.noise import Gaussian
from hush.sampling import Poisson
from hush_recipes.records import imdb
from hush_recipes.records.bag_of_words import BagOfWords
from hush_recipes.records.imdb import Settings
from hush_recipes.records.protocol import DELTA, FIRST_FINAL_SEED, Job, Outcome

SMALL = BagOfWords(words=40, pairs=12, last=4, most_words=20, most_pairs=10)
SETTINGS = Settings(features=SMALL, learning_rate=20.0, steps=20)


def made_up(count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Reviews of 5 to 24 words of ranks up to 50; word 30 + label is in nearly all of them."""
    drawn = np.random.default_rng(seed)
    texts, labels = drawn.integers(1, 51, (count, 24)), drawn.integers(0, 2, count)
    texts[texts == 30] = texts[texts == 31] = 1
    texts[:, 0] = np.where(drawn.random(count) < 0.95, 30 + labels, 2)
    texts[np.arange(24) >= drawn.integers(5, 25, (count, 1))] = 0
    return texts, labels


@pytest.fixture(autouse=True)
def reviews(monkeypatch: pytest.MonkeyPatch) -> Iterator[Dataset]:
    """The made-up reviews in place of the published ones."""
    (x, y), (x_test, y_test) = made_up(400, 0), made_up(100, 1)
    dataset = Dataset(name="imdb", x_train=x, y_train=y, x_test=x_test, y_test=y_test, classes=2)
    monkeypatch.setattr(imdb, "read_imdb", lambda folder, length, vocabulary: dataset)
    for cached in (imdb._parts, imdb._reviews):
        cached.cache_clear()
    yield dataset
    for cached in (imdb._parts, imdb._reviews):
        cached.cache_clear()


def job(level: float = 3.0, held_out: int = 0, settings: Settings = SETTINGS) -> Job[Settings]:
    return Job(data="imdb", held_out=held_out, settings=settings, epsilon=level, seed=0, device="cpu")


def direct(text: list[int], bag: BagOfWords) -> dict[int, float]:
    """Features of one review, by dictionaries."""
    words = [word for word in text if word]
    weight = {
        word - 1: math.sqrt(word + 10) * (1.5 if word in words[-bag.last :] else 1.0)
        for word in sorted({word for word in words if word <= bag.words})[: bag.most_words]
    }
    pairs = {(a, b) for a, b in pairwise(words) if max(a, b) <= bag.pairs}
    kept = sorted(pairs)[: bag.most_pairs]
    scale = math.sqrt((1 - bag.share) / (sum(value**2 for value in weight.values()) or 1))
    return {word: scale * value for word, value in weight.items()} | {
        bag.words + (a - 1) * bag.pairs + b - 1: math.sqrt(bag.share / len(kept)) for a, b in kept
    }


@pytest.mark.parametrize(
    "bag",
    [SMALL, BagOfWords(words=40, pairs=45, last=4, most_words=6, most_pairs=5)],
    ids=["whole", "cut"],
)
def test_features_are_those_of_each_review_alone(bag: BagOfWords) -> None:
    texts = np.concatenate([made_up(200, 2)[0], np.zeros((1, 24), dtype=np.int64)])
    index, value = bag(texts)
    assert index.shape == value.shape == (len(texts), bag.most_words + bag.most_pairs)
    assert int(index.max()) < bag.size
    for text, where, values in zip(texts, index, value, strict=True):
        used = {int(i): float(v) for i, v in zip(where, values, strict=True) if v}
        assert used == pytest.approx(direct(text.tolist(), bag), rel=1e-6)
        assert len(used) == np.count_nonzero(values)


def test_a_run_spends_its_budget_on_its_steps_and_learns() -> None:
    outcome = imdb.run(job())
    plan = Plan(
        sampling=Poisson(SETTINGS.sampling_rate),
        clipping=L2(SETTINGS.clip),
        noise=Gaussian(outcome.multiplier),
    )
    charged = epsilon(plan, SETTINGS.steps, DELTA).epsilon.upper
    assert outcome.epsilon == pytest.approx(charged)
    assert 2.95 < outcome.epsilon <= 3.0
    assert imdb.run(job(level=100.0)).accuracy > 0.9


def test_sums_over_a_physical_batch_round_within_what_is_paid_for() -> None:
    bag = BagOfWords()
    positions = torch.zeros(1, bag.most_words + bag.most_pairs, dtype=torch.int64)
    term = RowFactors(positions, positions.float().unsqueeze(-1), torch.Size([bag.size, 1]))
    assert term.rounding_bounded(imdb._PHYSICAL_BATCH)


def test_the_search_never_scores_test_reviews_and_final_runs_have_fresh_seeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs: list[Job[Settings]] = []

    def listed(job: Job[Settings]) -> Outcome:
        jobs.append(job)
        return Outcome(accuracy=0.5, epsilon=job.epsilon, multiplier=1.0)

    monkeypatch.setattr(imdb, "run", listed)
    rows = imdb.records_imdb_search(seeds=2, processes=1).rows
    assert {job.held_out for job in jobs} == {imdb.HELD_OUT}
    assert max(job.seed for job in jobs) < FIRST_FINAL_SEED
    assert len({(job.epsilon, job.settings) for job in jobs}) == len(rows), "no candidate twice"
    searched = {(job.epsilon, job.settings) for job in jobs}
    jobs.clear()
    last = imdb.records_imdb(seeds=2, processes=1)
    assert any("counted on the training reviews" in note for note in last.notes)
    assert any("cut to, 1,024 words, which was chosen knowing theirs" in note for note in last.notes)
    assert any("of one run that is released alone" in note for note in last.notes)
    assert {job.held_out for job in jobs} == {0}
    assert min(job.seed for job in jobs) == FIRST_FINAL_SEED
    assert {(job.epsilon, job.settings) for job in jobs} <= searched, "what is used was a candidate"
    assert {job.epsilon for job in jobs} == {1.0, 3.0, 8.0}
