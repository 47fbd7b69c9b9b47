"""The bound from scores: right as often as it says, close to the truth, from runs not yet seen."""

import math

import numpy as np
import pytest
from scipy import optimize, stats

from hush.audit.lower_bound import (
    Array,
    Audit,
    Draws,
    by_frequency,
    by_line,
    by_trees,
    epsilon_lower,
    epsilon_lower_bound,
)
from hush.core.errors import InvalidValue

DELTA = 0.01


def true_epsilon(separation: float) -> float:
    """Of two unit normals so far apart, at DELTA: by its definition, from two cdfs."""

    def excess(epsilon: float) -> float:
        at = epsilon / separation - separation / 2
        kept = stats.norm.sf(at) - math.exp(epsilon) * stats.norm.sf(at + separation)
        return float(kept - DELTA)

    return float(optimize.brentq(excess, 0, 20))


def normals(rng: np.random.Generator, runs: int, separation: float) -> Draws:
    return Draws(present=rng.normal(separation, 1, runs), absent=rng.normal(0, 1, runs))


def test_it_finds_most_of_a_known_epsilon_and_no_more() -> None:
    rng, truth = np.random.default_rng(0), true_epsilon(1.0)
    found = [epsilon_lower_bound(normals(rng, 4000, 1.0), DELTA, 0.9) for _ in range(60)]
    assert np.mean(np.array(found) > truth) <= 0.1
    assert np.median(found) > 0.6 * truth
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


def test_classifiers_learn_what_a_line_or_a_table_shows() -> None:
    rng = np.random.default_rng(2)
    moved = Draws(present=rng.normal([0.8, -0.6], 1, (4000, 2)), absent=rng.normal(0, 1, (4000, 2)))
    truth = true_epsilon(1.0)
    for learnt in (by_line, by_trees):
        assert 0.4 * truth < epsilon_lower_bound(learnt(moved), DELTA, 0.95) < truth
    votes = Draws(
        present=rng.choice([2.0, 7.0, 9.0], 4000, p=[0.6, 0.2, 0.2]),
        absent=rng.choice([2.0, 7.0, 9.0], 4000, p=[0.2, 0.2, 0.6]),
    )
    assert 0.8 < epsilon_lower_bound(by_frequency(votes), 1e-9, 0.95) < math.log(3)


def test_trees_see_what_a_line_does_not() -> None:
    rng = np.random.default_rng(3)
    alike = Draws(
        present=rng.multivariate_normal([0, 0], [[1, 0.95], [0.95, 1]], 4000),
        absent=rng.normal(0, 1, (4000, 2)),
    )
    assert epsilon_lower_bound(by_line(alike), DELTA, 0.95) < 0.3
    assert epsilon_lower_bound(by_trees(alike), DELTA, 0.95) > 1


def test_scores_say_nothing_of_runs_they_were_not_learnt_from() -> None:
    """On pure noise a classifier tells the runs it has learnt apart, and no others."""
    rng = np.random.default_rng(4)
    noise = Draws(present=rng.normal(0, 1, (200, 8)), absent=rng.normal(0, 1, (200, 8)))
    scores = by_trees(noise)

    def apart(some: slice) -> float:
        ranks: Array = stats.mannwhitneyu(scores.present[some], scores.absent[some]).pvalue
        return float(ranks)

    assert apart(slice(0, None, 2)) < 1e-9
    assert apart(slice(1, None, 2)) > 1e-3
    assert epsilon_lower_bound(scores, DELTA, 0.95) == 0


def test_an_audit_compares() -> None:
    audit = Audit(lower=1.0, charge=2.0, delta=DELTA, confidence=0.95, runs=10)
    assert audit.holds
    assert audit.tightness == 0.5
    assert not Audit(lower=2.1, charge=2.0, delta=DELTA, confidence=0.95, runs=10).holds
    with pytest.raises(InvalidValue, match="too few"):
        epsilon_lower_bound(Draws(present=np.zeros(1), absent=np.zeros(1)), DELTA, 0.95)
