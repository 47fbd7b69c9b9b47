"""Private argmax: its law, its cost, and what someone who guesses can find; a test before the answer."""

import functools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import gamma, gammainc
from scipy.stats import beta as beta_law
from scipy.stats import norm

import hush
from hush.accounting.epsilon import compose
from hush.accounting.epsilon import delta as delta_of
from hush.core.errors import BudgetExceeded, InvalidValue, Unproved
from hush.core.guarantee import Budget, Neighbours
from hush.core.parts import Noise
from hush.pate.argmax import NO_ANSWER, Confident, NoisyMax, planned, with_noise

Array = NDArray[np.float64]
NOISES: list[tuple[float, Noise]] = [
    (2.0, hush.Gaussian(3.0 / math.sqrt(2))),
    (1.0, hush.Laplace(3.0)),
    (1.5, hush.GeneralizedGaussian(beta=1.5, multiplier=3.0)),
    (4.0, hush.GeneralizedGaussian(beta=4.0, multiplier=3.0)),
]


def chances(scores: Array, beta: float, scale: float = 3.0) -> Array:
    """Each score's chance to be the largest after noise exp(-|x / scale|^beta), by integration."""
    x = np.linspace(-40 * scale, 40 * scale, 12_001)
    density = beta / (2 * scale * float(gamma(1 / beta))) * np.exp(-(np.abs(x / scale) ** beta))
    probabilities = np.empty(len(scores))
    for i, score in enumerate(scores):
        below = [chance_below(score - other, beta, scale) for other in np.delete(scores, i)]
        probabilities[i] = (density * np.prod(below, axis=0)).sum() * (x[1] - x[0])
    return probabilities


@functools.cache  # leads are whole numbers, and few
def chance_below(lead: float, beta: float, scale: float) -> Array:
    """The noise's distribution function at every point of integration, moved by a lead."""
    x = np.linspace(-40 * scale, 40 * scale, 12_001) + lead
    return np.asarray((1 + np.sign(x) * gammainc(1 / beta, np.abs(x / scale) ** beta)) / 2)


@pytest.mark.parametrize(("beta", "noise"), NOISES)
def test_the_answers_have_the_law_that_is_charged(beta: float, noise: Noise) -> None:
    scores, asked = torch.tensor([10.0, 8.0, 7.0]), 60_000
    expected = asked * chances(scores.numpy().astype(float), beta)

    def distance(mechanism: NoisyMax) -> float:
        generator = torch.Generator().manual_seed(0)
        answers = mechanism(scores.expand(asked, -1), generator)
        counts = np.bincount(answers.numpy(), minlength=3)
        return float(((counts - expected) ** 2 / expected).sum())

    honest = NoisyMax.of_votes(noise=noise)
    assert distance(honest) < 20  # chi-square, two degrees of freedom
    multiplier = noise.to_plain()["multiplier"]
    for factor in (0.9, 1.1):
        off = replace(honest, noise=replace(noise, multiplier=factor * multiplier))  # type: ignore[call-arg]
        assert distance(off) > 20


def neighbours(scores: Array, relation: Neighbours) -> list[Array]:
    votes = np.eye(len(scores))
    if relation is not Neighbours.REPLACE:
        return [scores + vote for vote in votes]
    return [scores - a + b for a in votes for b in votes if not np.array_equal(a, b)]


@pytest.mark.few(3)
@pytest.mark.parametrize(("beta", "noise"), NOISES)
@pytest.mark.parametrize("relation", list(Neighbours))
def test_no_answer_tells_more_than_the_charge(beta: float, noise: Noise, relation: Neighbours) -> None:
    random = np.random.default_rng(0)
    plan = NoisyMax.of_votes(noise=noise, neighbours=relation).plan
    for epsilon in (0.05, 0.3, 0.8):
        allowed = delta_of({plan: 1}, epsilon).upper
        for _ in range(6):
            scores = random.integers(1, 12, size=int(random.integers(2, 5))).astype(float)
            probabilities = chances(scores, beta)
            for other in neighbours(scores, relation):
                changed = chances(other, beta)
                for p, q in ((probabilities, changed), (changed, probabilities)):
                    delta_needed = np.maximum(p - math.exp(epsilon) * q, 0.0).sum()
                    assert delta_needed <= allowed + 1e-9


def found_epsilon(mechanism: NoisyMax, delta: float) -> float:
    """A lower bound on epsilon at `delta` that holds with near certainty: someone guesses, many times.

    The best set of answers between two classes is one class; its chances in both worlds are counted,
    and bounded by Clopper and Pearson.
    """
    generator, asked, doubt = torch.Generator().manual_seed(0), 400_000, 1e-6
    best = 0.0
    for gap in range(-6, 7):
        first = torch.tensor([20.0 + gap, 20.0])
        second = first + torch.tensor([-1.0, 1.0])
        hits = int((mechanism(first.expand(asked, -1), generator) == 0).sum())
        false_hits = int((mechanism(second.expand(asked, -1), generator) == 0).sum())
        hit_rate = beta_law.ppf(doubt, hits, asked - hits + 1)
        false_rate = beta_law.ppf(1 - doubt, false_hits + 1, asked - false_hits)
        if hit_rate > delta:
            best = max(best, math.log((hit_rate - delta) / false_rate))
    return best


@pytest.mark.parametrize(
    ("beta", "noise"), [*NOISES[:3], pytest.param(*NOISES[3], marks=pytest.mark.slow)]
)
def test_half_the_noise_is_caught_and_the_honest_one_is_not(beta: float, noise: Noise) -> None:
    honest, delta = NoisyMax.of_votes(noise=noise), 0.02
    promised = honest.guarantee(queries=1, delta=delta).epsilon.upper
    assert found_epsilon(honest, delta) <= promised
    halved = replace(noise, multiplier=noise.to_plain()["multiplier"] / 2)  # type: ignore[call-arg]
    assert found_epsilon(NoisyMax.of_votes(noise=halved), delta) > promised


def test_a_charge_for_one_count_is_caught() -> None:
    """What Theorem 2 of the generalized Gaussian paper promises, for votes that may be replaced."""
    noise, delta = hush.Gaussian(2.0), 0.02
    replacing = NoisyMax.of_votes(noise=noise)
    adding = NoisyMax.of_votes(noise=noise, neighbours=Neighbours.ADD_REMOVE)
    lower = found_epsilon(replacing, delta)
    assert lower <= replacing.guarantee(queries=1, delta=delta).epsilon.upper
    assert lower > adding.guarantee(queries=1, delta=delta).epsilon.upper
    # Normal noise and two classes: nothing is lost by charging the counts.
    assert lower > 0.9 * replacing.guarantee(queries=1, delta=delta).epsilon.upper


def test_the_relation_is_part_of_the_statement() -> None:
    noise = hush.Laplace(10.0)
    votes = NoisyMax.of_votes(noise=noise)
    assert "replace one vote" in str(votes.guarantee(queries=5, delta=1e-5))
    scores = NoisyMax(
        noise=noise, moved=hush.Entries(changed=4, norm=0.5), neighbours=Neighbours.ADD_REMOVE
    )
    assert "add/remove one record" in str(scores.guarantee(queries=5, delta=1e-5))
    # Half as many counts move when twice as many queries are asked.
    assert scores.guarantee(queries=5, delta=1e-5).epsilon == votes.guarantee(10, 1e-5).epsilon


def test_scores_whose_whole_change_is_bounded() -> None:
    by_norm = NoisyMax(
        noise=hush.Gaussian(20.0 / math.sqrt(2)),
        moved=hush.L2(math.sqrt(2)),
        neighbours=Neighbours.REPLACE,
    )
    votes = NoisyMax.of_votes(noise=hush.Gaussian(20.0))
    ours, theirs = by_norm.guarantee(50, 1e-5), votes.guarantee(50, 1e-5)
    assert ours.epsilon.upper == pytest.approx(theirs.epsilon.upper)
    with pytest.raises(Unproved, match="Clip with"):
        NoisyMax(noise=hush.Laplace(1.0), moved=hush.L2(1.0), neighbours=Neighbours.REPLACE)


@pytest.mark.parametrize(
    "noise",
    [
        hush.Rectified(scale=200.0, bound=0.25),
        hush.Truncated(scale=200.0, bound=0.25),
        hush.StochasticSign(scale=200.0),
        hush.Quantized(scale=200.0, bound=0.25, levels=3),
    ],
    ids=str,
)
def test_noise_on_a_fixed_support_decides_nothing(noise: Noise) -> None:
    """Drawn around 0 and added it changes no answer; drawn around the scores it makes all alike."""
    with pytest.raises(Unproved, match="bounded support"):
        NoisyMax(
            noise=noise, moved=hush.L2(math.sqrt(2)), neighbours=Neighbours.REPLACE, unit="one vote"
        )
    vote = NoisyMax.of_votes(noise=hush.Gaussian(1.0))
    with pytest.raises(Unproved, match="bounded support"):
        Confident(vote=vote, threshold=10.0, noise=noise)


def confident(vote: float = 10.0, test: float = 15.0, threshold: float = 60.0) -> Confident:
    return Confident(
        vote=NoisyMax.of_votes(noise=hush.Gaussian(vote)), threshold=threshold, noise=hush.Gaussian(test)
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
        sampling=hush.FullBatch(), clipping=hush.L2(1.0), noise=hush.Gaussian(1 / separation)
    )
    assert query.guarantee(500, 1e-5, 100).epsilon.upper == pytest.approx(
        hush.epsilon(plain, steps=1, delta=1e-5).epsilon.upper
    )
    assert query.guarantee(500, 1e-5) == query.guarantee(500, 1e-5, answers=500)
    assert query.guarantee(500, 1e-5) == query.guarantee(500, 1e-5, answers=900)


@pytest.mark.parametrize("noise", [hush.Gaussian(1.0), hush.Laplace(1.0)])
def test_the_noise_a_budget_asks_for(noise: hush.Gaussian | hush.Laplace) -> None:
    budget = Budget(epsilon=2.0, delta=1e-5)
    vote = NoisyMax.of_votes(noise=noise)
    for query in (vote, Confident(vote=vote, threshold=60.0, noise=hush.Gaussian(3.0))):
        scaled = with_noise(query, budget, queries=200, answers=100)
        cost = compose(planned(scaled, 200, 100), 1e-5).epsilon.upper
        assert 0.999 * 2.0 <= cost <= 2.0
        if isinstance(scaled, Confident):
            ratio = scaled.noise.to_plain()["multiplier"] / scaled.vote.noise.to_plain()["multiplier"]
            assert ratio == pytest.approx(3.0)
    with pytest.raises(BudgetExceeded, match="Pass fewer queries"):
        with_noise(vote, Budget(epsilon=1e-12, delta=1e-12), queries=10**6, answers=10**6)


def test_calibrate_takes_a_noisy_max() -> None:
    budget = Budget(epsilon=1.0, delta=1e-5)
    vote = NoisyMax.of_votes(noise=hush.Gaussian(multiplier=1.0))
    for query in (vote, Confident(vote=vote, threshold=9.0, noise=hush.Gaussian(multiplier=3.0))):
        found = hush.calibrate(query, budget, steps=50)
        assert found == with_noise(query, budget, 50, 50)
        assert 0.99 < found.guarantee(50, delta=1e-5).epsilon.upper <= 1.0
    with pytest.raises(InvalidValue, match="spent, dimension and adjacency do not apply"):
        hush.calibrate(vote, budget, 50, spent={vote.plan: 1})  # type: ignore[call-overload]
