"""Clopper-Pearson against binomial sums; lower bounds on epsilon against known mechanisms."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from hush.audit.lower_bound import clopper_pearson, epsilon_lower
from hush.core.errors import InvalidValue
from hush_recipes.audit.scores import Audit, Draws, epsilon_lower_bound

DELTA = 0.01


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


def test_epsilon_of_a_known_mechanism_is_found_and_never_passed() -> None:
    # randomised response tells the truth with chance e / (1 + e): epsilon is 1 exactly
    truth = math.e / (1 + math.e)
    rng = np.random.default_rng(0)
    bounds = [
        epsilon_lower(
            int(rng.binomial(2000, truth)), 2000, int(rng.binomial(2000, 1 - truth)), 2000, 1e-9, 0.9
        )
        for _ in range(400)
    ]
    assert np.mean(np.array(bounds) > 1) < 0.1
    assert np.median(bounds) > 0.8
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


def true_epsilon(separation: float) -> float:
    """Of two unit normals so far apart, at DELTA: by its definition, from two cdfs."""

    def excess(epsilon: float) -> float:
        at = epsilon / separation - separation / 2
        delta = stats.norm.sf(at) - math.exp(epsilon) * stats.norm.sf(at + separation)
        return float(delta - DELTA)

    return float(optimize.brentq(excess, 0, 20))


def normals(rng: np.random.Generator, runs: int, separation: float) -> Draws:
    return Draws(present=rng.normal(separation, 1, runs), absent=rng.normal(0, 1, runs))


def test_it_finds_most_of_a_known_epsilon_and_no_more() -> None:
    rng, truth = np.random.default_rng(0), true_epsilon(1.0)
    bounds = [epsilon_lower_bound(normals(rng, 4000, 1.0), DELTA, 0.9) for _ in range(60)]
    assert np.mean(np.array(bounds) > truth) <= 0.1
    assert np.median(bounds) > 0.6 * truth
    assert epsilon_lower_bound(normals(rng, 200_000, 1.0), DELTA, 0.95) > 0.9 * truth


def test_a_threshold_chosen_on_what_is_counted_would_cheat() -> None:
    """There is nothing to find: at 30% confidence 70% of audits may find something, by chance."""
    rng = np.random.default_rng(1)

    def cheating(draws: Draws) -> float:
        places = np.concatenate([draws.present, draws.absent])[::6]
        counts = [[int((part >= at).sum()) for part in (draws.present, draws.absent)] for at in places]
        return max(epsilon_lower(hits, 300, wrong, 300, DELTA, 0.3) for hits, wrong in counts)

    all_draws = [normals(rng, 300, 0.0) for _ in range(60)]
    honest = np.mean([epsilon_lower_bound(draws, DELTA, 0.3) > 0 for draws in all_draws])
    cheated = np.mean([cheating(draws) > 0 for draws in all_draws])
    assert honest <= 0.7 < cheated


def test_an_audit_compares() -> None:
    audit = Audit(lower=1.0, charge=2.0, delta=DELTA, confidence=0.95, runs=10)
    assert audit.holds
    assert audit.tightness == 0.5
    assert not Audit(lower=2.1, charge=2.0, delta=DELTA, confidence=0.95, runs=10).holds
    with pytest.raises(InvalidValue, match="too few"):
        epsilon_lower_bound(Draws(present=np.zeros(1), absent=np.zeros(1)), DELTA, 0.95)
