"""Answers only where a noisy test passes."""

import math

import pytest
import torch
from scipy.stats import norm

import hush
from hush.accounting.epsilon import compose
from hush.core.errors import BudgetExceeded, InvalidValue
from hush.core.guarantee import Budget
from hush.pate.argmax import NoisyMax
from hush.pate.confident import NO_ANSWER, Confident, planned, with_noise


def confident(vote: float = 10.0, test: float = 15.0, threshold: float = 60.0) -> Confident:
    return Confident(
        vote=NoisyMax.of_votes(noise=hush.Gaussian(multiplier=vote)),
        threshold=threshold,
        noise=hush.Gaussian(multiplier=test),
    )


def test_the_test_passes_as_often_as_its_noise_says() -> None:
    scores = torch.tensor([70.0, 20.0, 10.0]).expand(100_000, -1)
    answers = confident()(scores, torch.Generator().manual_seed(0))
    passed = (answers != NO_ANSWER).double().mean()
    assert float(passed) == pytest.approx(norm.cdf(10 / 15), abs=0.006)
    assert abs(norm.cdf(10 / 12) - norm.cdf(10 / 15)) > 0.04  # the check would see other noise
    won = (answers[answers != NO_ANSWER] == 0).double().mean()
    assert float(won) == pytest.approx(1.0, abs=0.01)


def test_every_query_pays_for_its_test_and_the_answered_ones_for_the_answer() -> None:
    query = confident()
    counts = {query.test: 500, query.vote.plan: 100}
    assert planned(query, 500, 100) == counts
    assert query.guarantee(500, 1e-5, 100).epsilon.upper == compose(counts, 1e-5).epsilon.upper
    # Normal noise: the squares of 1 / deviation add, two counts for an answer and one for a test.
    separation = math.sqrt(500 / 15**2 + 100 * 2 / 10**2)
    plain = hush.Plan(
        sampling=hush.FullBatch(),
        clipping=hush.L2(norm=1.0),
        noise=hush.Gaussian(multiplier=1 / separation),
    )
    assert query.guarantee(500, 1e-5, 100).epsilon.upper == pytest.approx(
        hush.epsilon(plain, steps=1, delta=1e-5).epsilon.upper
    )
    assert query.guarantee(500, 1e-5) == query.guarantee(500, 1e-5, answers=500)
    assert query.guarantee(500, 1e-5) == query.guarantee(500, 1e-5, answers=900)


def test_no_plan_is_lost_where_test_and_answer_are_the_same_plan() -> None:
    noise = hush.Laplace(multiplier=10.0)
    vote = NoisyMax.of_votes(noise=noise, neighbours=hush.Neighbours.ADD_REMOVE)
    query = Confident(vote=vote, threshold=5.0, noise=noise)
    assert query.test == vote.plan
    assert planned(query, 30, 20) == {vote.plan: 50}


@pytest.mark.parametrize("noise", [hush.Gaussian(multiplier=1.0), hush.Laplace(multiplier=1.0)])
def test_the_noise_a_budget_asks_for(noise: hush.Gaussian | hush.Laplace) -> None:
    budget = Budget(epsilon=2.0, delta=1e-5)
    vote = NoisyMax.of_votes(noise=noise)
    for query in (vote, Confident(vote=vote, threshold=60.0, noise=hush.Gaussian(multiplier=3.0))):
        scaled = with_noise(query, budget, queries=200, answers=100)
        cost = compose(planned(scaled, 200, 100), 1e-5).epsilon.upper
        assert 0.999 * 2.0 <= cost <= 2.0
        if isinstance(scaled, Confident):
            ratio = scaled.noise.to_plain()["multiplier"] / scaled.vote.noise.to_plain()["multiplier"]
            assert ratio == pytest.approx(3.0)
    with pytest.raises(BudgetExceeded, match="Ask fewer queries"):
        with_noise(vote, Budget(epsilon=1e-12, delta=1e-12), queries=10**6, answers=10**6)


def test_bad_settings_are_named() -> None:
    with pytest.raises(InvalidValue, match="threshold=-1"):
        confident(threshold=-1.0)
    with pytest.raises(InvalidValue, match="queries=0 must be a whole number >= 1"):
        confident().guarantee(0, 1e-5)
    with pytest.raises(InvalidValue, match="delta=1"):
        confident().guarantee(10, 1.0)
