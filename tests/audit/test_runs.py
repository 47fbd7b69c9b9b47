"""Bounds from one run and from many: exact laws, mechanisms of known epsilon, and broken ones."""

import itertools
import math
from operator import eq

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from hush.accounting.pld import analytic_gaussian
from hush.audit.lower_bound import (
    Guesses,
    InverseCurve,
    approximate_dp_curve,
    gaussian_curve,
    many_runs,
    one_run,
    refutes_curve,
    separation_lower,
    surest_guesses,
)
from hush.core.errors import DataError

CANARIES, DELTA = 400, 1e-5


def coins(rng: np.random.Generator) -> np.ndarray:
    return rng.random(CANARIES) < 0.5


def responses(rng: np.random.Generator, truth: np.ndarray, epsilon: float) -> np.ndarray:
    """Randomised response: each coin told truly with chance exp(epsilon) / (1 + exp(epsilon))."""
    lies = rng.random(len(truth)) > 1 / (1 + math.exp(-epsilon))
    return np.where(truth ^ lies, 1.0, 0.0) + rng.random(len(truth)) / 2


def test_randomised_response_is_bounded_below_by_less_than_its_epsilon() -> None:
    rng = np.random.default_rng(0)
    bounds = []
    for _ in range(60):
        truth = coins(rng)
        bounds.append(one_run(responses(rng, truth, 1.0), truth, delta=DELTA).epsilon)
    assert sum(bound > 1.0 for bound in bounds) <= 6  # 5% of them on average at most
    assert np.median(bounds) > 0.5
    # the same answers said to have epsilon 0.25: caught nearly always
    assert sum(bound > 0.25 for bound in bounds) >= 55


def test_normal_noise_is_bounded_below_by_less_than_its_separation_unless_it_is_a_quarter() -> None:
    rng = np.random.default_rng(1)
    true = analytic_gaussian.epsilon(1.0, DELTA)
    above = {"separation": 0, "epsilon": 0, "quarter": 0}
    for _ in range(40):
        truth = coins(rng)
        bound = one_run(truth + rng.normal(size=CANARIES), truth, delta=DELTA)
        assert bound.separation > 0
        above["separation"] += bound.separation > 1.0
        above["epsilon"] += bound.epsilon > true.upper
        broken = one_run(truth + rng.normal(size=CANARIES) / 4, truth, delta=DELTA)
        above["quarter"] += broken.epsilon > 0.8 and broken.separation > 1.0
        assert bound.gaussian_epsilon == analytic_gaussian.epsilon(bound.separation, DELTA).lower
    assert above["separation"] <= 5
    assert above["epsilon"] <= 5
    assert above["quarter"] == 40


def test_the_printed_bound_is_exceeded_and_the_one_used_is_not() -> None:
    """Three coins told at random, but hardly ever all wrong: 0 and .01 private in each coin."""
    delta = 0.01
    less = 7 / 8 * delta  # taken from the answer that is wrong everywhere, and shared by the others
    laws = {
        truth: {
            answer: 1 / 8 + (less / 7 if any(map(eq, answer, truth)) else -less)
            for answer in itertools.product([False, True], repeat=3)
        }
        for truth in itertools.product([False, True], repeat=3)
    }
    for first, second in itertools.combinations(laws, 2):
        distance = sum(abs(laws[first][answer] - laws[second][answer]) for answer in laws[first]) / 2
        assert distance == pytest.approx(delta)  # for one coin flipped, and for more
    some = 1 - laws[True, True, True][False, False, False]
    printed = 7 / 8 + 2 * 3 * delta * 1 / 8
    assert some > printed + 1e-3
    guesses = Guesses(canaries=3, made=3, right=1)
    assert not refutes_curve(guesses, some * (1 - 1e-9), approximate_dp_curve(0.0, delta))


def failing(truth: tuple[bool, ...], epsilon: float, delta: float) -> dict[tuple[bool, ...], float]:
    """Tell every coin with probability delta, else randomised response: what correlates most."""
    q = 1 / (1 + math.exp(-epsilon))
    law = {}
    for answer in itertools.product([False, True], repeat=len(truth)):
        right = sum(a == b for a, b in zip(answer, truth, strict=True))
        law[answer] = (1 - delta) * q**right * (1 - q) ** (len(truth) - right) + delta * (
            answer == truth
        )
    return law


def test_curves_hold_for_a_mechanism_that_fails_with_all_canaries_at_once() -> None:
    truth, epsilon, delta = (True, False, True, True, False, True), 0.5, 0.02
    law = failing(truth, epsilon, delta)
    for right in range(7):
        exact = sum(
            p
            for answer, p in law.items()
            if sum(a == b for a, b in zip(answer, truth, strict=True)) >= right
        )
        guesses = Guesses(canaries=6, made=6, right=right)
        assert not refutes_curve(guesses, exact * (1 - 1e-9), approximate_dp_curve(epsilon, delta))
        if right == 6:
            # without delta the bound would be false
            assert refutes_curve(guesses, exact * (1 - 1e-9), approximate_dp_curve(epsilon, 1e-15))


@pytest.mark.parametrize(
    ("rate", "curve", "slack"),
    [
        (ndtr(0.5), gaussian_curve(1.0), 10.0),
        (1 / (1 + math.exp(-1.0)), approximate_dp_curve(1.0, 1e-12), 1.05),
    ],
)
def test_curves_refute_no_more_than_the_law_of_independent_canaries(
    rate: float, curve: InverseCurve, slack: float
) -> None:
    """Each canary told on its own at the best threshold of the curve: the tail is exactly binomial."""
    made = 12
    for right in range(7, 13):
        law = [math.comb(made, k) * rate**k * (1 - rate) ** (made - k) for k in range(made + 1)]
        tail = sum(law[right:])
        guesses = Guesses(canaries=made, made=made, right=right)
        assert not refutes_curve(guesses, tail * (1 - 1e-9), curve)
        levels = np.geomspace(tail, 1, 400)
        bound = next((x for x in levels if refutes_curve(guesses, float(x), curve)), 1.0)
    # and not much less, at the end where all were right
    assert tail <= bound < slack * tail


def test_the_surest_are_guessed_and_counted() -> None:
    scores, truth = [5.0, 4.0, 3.0, 2.0, 1.0], [True, False, True, True, False]
    assert surest_guesses(scores, truth, 2).right == 2
    assert surest_guesses(scores, truth, 5).right == 3
    assert surest_guesses(scores, truth, 1) == Guesses(canaries=5, made=1, right=1)
    with pytest.raises(DataError, match="do not match"):
        surest_guesses(scores, truth[:2], 1)
    with pytest.raises(DataError, match="is NaN"):
        surest_guesses([math.nan], [True], 1)


def test_the_curve_is_found_and_not_exceeded_unless_noise_is_missing() -> None:
    rng = np.random.default_rng(0)
    true = analytic_gaussian.epsilon(1.0, 1e-5).upper
    sound, broken = [], []
    for _ in range(100):
        outside = rng.normal(size=1000)
        sound.append(many_runs(1 + rng.normal(size=1000), outside, delta=1e-5))
        broken.append(many_runs(1 + rng.normal(size=1000) / 4, outside / 4, delta=1e-5))
    assert sum(bound.separation > 1.0 for bound in sound) <= 8
    assert sum(bound.gaussian_epsilon > true for bound in sound) <= 8
    assert sum(bound.epsilon > true for bound in sound) == 0
    assert np.median([bound.separation for bound in sound]) > 0.7
    assert all(bound.gaussian_epsilon > true for bound in broken)


def test_the_separation_of_counts() -> None:
    near = separation_lower(8413, 10_000, 1587, 10_000, 0.95)
    assert 1.9 < near < ndtri(0.8413) - ndtri(0.1587)
    assert separation_lower(0, 10, 0, 10, 0.95) == 0.0
    assert separation_lower(5, 10, 10, 10, 0.95) == 0.0
    with pytest.raises(DataError, match="at least 8"):
        many_runs([1.0] * 9, [1.0], delta=1e-5)
