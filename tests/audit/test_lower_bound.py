"""Clopper-Pearson against sums of binomial chances; the bound on epsilon against what it must refute."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.audit.lower_bound import clopper_pearson, epsilon_lower
from hush.core.errors import InvalidValue


def binomial_tail(at_least: int, trials: int, chance: float) -> mpmath.mpf:
    """P(X >= at_least), one term after another in 50 digits."""
    with mpmath.workdps(50):
        p = mpmath.mpf(chance)
        terms = (
            mpmath.binomial(trials, k) * p**k * (1 - p) ** (trials - k)
            for k in range(at_least, trials + 1)
        )
        return mpmath.fsum(terms)


@pytest.mark.parametrize(("successes", "trials"), [(0, 7), (1, 20), (13, 40), (199, 200), (60, 60)])
@pytest.mark.parametrize("confidence", [0.5, 0.95, 1 - 1e-6])
def test_the_ends_are_where_the_tails_are_as_rare_as_asked(
    successes: int, trials: int, confidence: float
) -> None:
    low, high = clopper_pearson(successes, trials, confidence)
    beyond = (1 - confidence) / 2
    if successes:
        assert float(binomial_tail(successes, trials, low)) == pytest.approx(beyond, rel=1e-8)
        assert binomial_tail(successes, trials, low) <= beyond, "rounded outwards"
    else:
        assert low == 0
    if successes < trials:
        below = float(1 - binomial_tail(successes + 1, trials, high))
        assert below == pytest.approx(beyond, rel=1e-3)
        assert below <= beyond, "rounded outwards"
    else:
        assert high == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.floats(0.01, 0.99), st.sampled_from([0.6, 0.9, 0.99]))
def test_it_covers_whatever_the_chance_and_a_plain_one_does_not(
    trials: int, chance: float, confidence: float
) -> None:
    chances = np.array(
        [math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(trials + 1)]
    )
    ends = [clopper_pearson(k, trials, confidence) for k in range(trials + 1)]
    covered = sum(p for p, (low, high) in zip(chances, ends, strict=True) if low <= chance <= high)
    assert covered >= confidence


def test_an_interval_of_one_deviation_would_not_cover() -> None:
    chances = np.array([math.comb(20, k) * 0.1**k * 0.9 ** (20 - k) for k in range(21)])
    plain = [k / 20 + 1.96 * math.sqrt(k / 20 * (1 - k / 20) / 20) for k in range(21)]
    covered = sum(p for p, high in zip(chances, plain, strict=True) if high >= 0.1)
    assert covered < 0.9, "the test above can fail"


def test_epsilon_of_a_known_mechanism_is_found_and_never_passed() -> None:
    # randomised response tells the truth with chance e / (1 + e): epsilon is 1 exactly
    truth = math.e / (1 + math.e)
    rng = np.random.default_rng(0)
    found = [
        epsilon_lower(
            int(rng.binomial(2000, truth)), 2000, int(rng.binomial(2000, 1 - truth)), 2000, 1e-9, 0.9
        )
        for _ in range(400)
    ]
    assert np.mean(np.array(found) > 1) < 0.1
    assert np.median(found) > 0.8
    # without an interval half of them would be above
    counts = rng.binomial(2000, [truth, 1 - truth], size=(400, 2))
    assert np.mean(np.log(counts[:, 0] / counts[:, 1]) > 1) > 0.4


def test_both_directions_are_looked_at() -> None:
    # the record is noticed for certain when the test says no: only the second direction shows it
    assert epsilon_lower(500, 1000, 500, 1000, 1e-5, 0.95) == 0
    one_sided = epsilon_lower(1000, 1000, 500, 1000, 1e-5, 0.95)
    _, high = clopper_pearson(500, 1000, 0.95)
    low, _ = clopper_pearson(1000, 1000, 0.95)
    assert one_sided == pytest.approx(math.log((1 - high - 1e-5) / (1 - low)))
    assert one_sided > math.log(low / high) + 3


def test_delta_is_taken_off() -> None:
    assert epsilon_lower(30, 1000, 0, 1000, 1e-9, 0.95) > 1
    assert epsilon_lower(30, 1000, 0, 1000, 0.05, 0.95) == 0


@pytest.mark.parametrize(
    ("counts", "word"),
    [((5, 4), "successes"), ((-1, 4), "successes"), ((0, 0), "trials"), ((0.5, 4), "successes")],
)
def test_counts_that_are_none_are_refused(counts: tuple[int, int], word: str) -> None:
    with pytest.raises(InvalidValue, match=word):
        clopper_pearson(*counts, 0.95)
    with pytest.raises(InvalidValue, match="confidence"):
        clopper_pearson(1, 2, 1.0)
