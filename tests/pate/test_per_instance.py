"""The data-dependent charge against the divergences that integration finds."""

import functools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import log_ndtr

import hush
from hush.core.errors import Unproved
from hush.pate.argmax import Confident, NoisyMax
from hush.pate.per_instance import divergences, per_instance, runner_up

Array = NDArray[np.float64]
ORDERS = np.array([1.1, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0, 35.0, 60.0, 100.0])
POINTS = np.linspace(-45.0, 45.0, 901)
"""A tenth apart: for smooth integrands the error of the sum is below that of its rounding."""


def log_chances(scores: Array, deviation: float) -> Array:
    """The logarithm of each score's chance to be the largest, after normal noise."""
    log_weight = -(POINTS**2) / 2 - math.log(2 * math.pi) / 2 + math.log(POINTS[1] - POINTS[0])
    log_probabilities = np.empty(len(scores))
    for i, score in enumerate(scores):
        lead = (score - np.delete(scores, i)) / deviation
        log_probabilities[i] = np.logaddexp.reduce(log_weight + log_ndtr(POINTS[:, None] + lead).sum(1))
    return log_probabilities


def replaced(scores: Array) -> list[Array]:
    """All histograms in which one vote went from one class to another."""
    votes = np.eye(len(scores))
    return [
        scores - votes[loser] + votes[winner]
        for loser in np.flatnonzero(scores >= 1)
        for winner in range(len(scores))
        if winner != loser
    ]


def divergence(log_p: Array, log_q: Array) -> Array:
    """The Rényi divergences between two laws on a few outcomes."""
    terms = ORDERS[:, None] * log_p + (1 - ORDERS[:, None]) * log_q
    result: Array = np.logaddexp.reduce(terms, axis=1) / (ORDERS - 1)
    return result


@functools.cache  # two tests look at the same histograms
def truth(votes: tuple[float, ...], deviation: float, reverse: bool = True) -> Array:
    """The largest divergence to a neighbour, and from one."""
    scores = np.array(votes)
    log_p = log_chances(scores, deviation)
    neighbours = [log_chances(log_q, deviation) for log_q in replaced(scores)]
    values = [divergence(log_p, log_q) for log_q in neighbours]
    values += [divergence(log_q, log_p) for log_q in neighbours if reverse]
    largest: Array = np.max(values, axis=0)
    return largest


def histograms(count: int) -> list[tuple[Array, float]]:
    """Random votes, from full agreement to none, and deviations of the noise."""
    random = np.random.default_rng(0)
    cases = []
    for _ in range(count):
        classes, teachers = int(random.integers(2, 7)), int(random.integers(10, 300))
        chances = random.dirichlet(np.full(classes, 10 ** random.uniform(-2, 1)))
        scores = random.multinomial(teachers, chances).astype(float)
        cases.append((scores, teachers * 10 ** random.uniform(-1.5, -0.3)))
    return cases


def vote(deviation: float) -> NoisyMax:
    return NoisyMax.of_votes(noise=hush.Gaussian(deviation))


def charge(scores: Array, deviation: float) -> Array:
    bound: Array = divergences(vote(deviation), torch.tensor(scores[None]), ORDERS)[0]
    return bound


def test_the_charge_is_never_below_what_integration_finds_for_any_neighbour() -> None:
    below_worst = 0
    for scores, deviation in histograms(120):
        bound, exact = charge(scores, deviation), truth(tuple(scores), deviation)
        assert (bound >= exact * (1 - 1e-9) - 1e-12).all(), (scores, deviation)
        assert (bound <= ORDERS / deviation**2 * (1 + 1e-9)).all()
        below_worst += bool((bound < 0.5 * ORDERS / deviation**2).any())
    assert below_worst > 40


def test_a_charge_that_forgets_half_of_the_change_is_caught() -> None:
    """As if a replaced vote moved one count only: below the truth in many a case."""
    wrong = NoisyMax.of_votes(noise=hush.Gaussian(1.0), neighbours=hush.Neighbours.ADD_REMOVE)
    caught = 0
    for scores, deviation in histograms(120):
        noise = hush.Gaussian(deviation)
        short = divergences(
            NoisyMax(noise=noise, moved=wrong.moved, neighbours=wrong.neighbours),
            torch.tensor(scores[None]),
            ORDERS,
        )[0]
        caught += bool((short < truth(tuple(scores), deviation) * (1 - 1e-6)).any())
    assert caught > 20


def test_one_direction_is_not_enough() -> None:
    scores, deviation = np.array([60.0, 5.0, 5.0]), 8.0
    assert (truth(tuple(scores), deviation) > 1.5 * truth(tuple(scores), deviation, reverse=False)).any()
    assert (charge(scores, deviation) >= truth(tuple(scores), deviation)).all()


def test_agreement_costs_almost_nothing_and_disagreement_the_worst_case() -> None:
    agreed = charge(np.array([250.0, 0.0, 0.0]), 20.0)
    assert (agreed[:5] < 1e-9).all()
    tied = charge(np.array([125.0, 125.0, 0.0]), 20.0)
    assert tied == pytest.approx(ORDERS / 400)


def test_the_chance_to_be_overturned_is_bounded() -> None:
    for scores, deviation in histograms(60):
        exact = log_chances(scores, deviation)
        exact[scores.argmax()] = -np.inf
        union = np.logaddexp.reduce(exact)
        assert runner_up(scores[None], deviation)[0] >= min(union, 0.0) - 1e-9


def confident_truth(scores: Array, query: Confident, deviation: float) -> Array:
    """The test and the answer together, as one law on the answers and none."""
    noise = query.noise.to_plain()["multiplier"]

    def law(of: Array) -> Array:
        margin = (of.max() - query.threshold) / noise
        return np.append(log_ndtr(margin) + log_chances(of, deviation), log_ndtr(-margin))

    log_p, neighbours = law(scores), [law(log_q) for log_q in replaced(scores)]
    pairs = [(log_p, log_q) for log_q in neighbours] + [(log_q, log_p) for log_q in neighbours]
    exact: Array = np.max([divergence(p, q) for p, q in pairs], axis=0)
    return exact


def test_a_test_before_the_answer_is_never_charged_too_little() -> None:
    random = np.random.default_rng(1)
    for scores, deviation in histograms(60):
        noise = hush.Gaussian(deviation * random.uniform(0.5, 3))
        threshold = float(scores.sum() * random.uniform(0.3, 1.0))
        query = Confident(vote=vote(deviation), threshold=threshold, noise=noise)
        bound = divergences(query, torch.tensor(scores[None]), ORDERS)[0]
        exact = confident_truth(scores, query, deviation)
        assert (bound >= exact * (1 - 1e-9) - 1e-12).all(), (scores, deviation, query)
        worst_case = hush.rdp(query.test, ORDERS) + hush.rdp(query.vote.plan, ORDERS)
        assert (bound <= worst_case * (1 + 1e-9) + 1e-9).all()


def test_the_statement_is_sensitive_and_for_gaussian_noise_only() -> None:
    scores = torch.tensor([[250.0, 0.0]] * 100)
    guarantee = per_instance(vote(20.0), scores, 1e-5)
    assert guarantee.sensitive
    assert guarantee.notion == "per-instance"
    assert "do not publish" in str(guarantee)
    assert guarantee.epsilon.upper < 0.2 < vote(20.0).guarantee(queries=100, delta=1e-5).epsilon.upper
    laplace = NoisyMax.of_votes(noise=hush.Laplace(20.0))
    with pytest.raises(Unproved, match="Laplace noise has no per-instance cost"):
        per_instance(laplace, scores, 1e-5)
