"""Laws of the number of trials: generating functions and draws against SciPy's laws."""

from random import Random

import numpy as np
import pytest
from scipy import stats

from hush.accounting.selection import draw_trials, trial_count
from hush.core.release import BestOf
from tests.accounting import selection_oracle as oracle
from tests.accounting.test_selection_bounds import LAWS, charged_law


@pytest.mark.parametrize(("kind", "shape", "mean"), LAWS)
def test_weights_are_the_derivative_of_the_generating_function(
    kind: str, shape: float, mean: float
) -> None:
    exact, law = oracle.law(kind, shape, mean), charged_law(kind, shape, mean)
    assert law.mean == pytest.approx(mean, rel=1e-9)
    better = np.linspace(0, 1, 50)
    assert law.weight(better) == pytest.approx(exact.derivative(1 - better), rel=1e-6)


@pytest.mark.parametrize(("kind", "shape", "mean"), LAWS)
def test_what_is_drawn_is_what_is_charged(kind: str, shape: float, mean: float) -> None:
    """And a law of a mean 30% larger would not pass."""
    law, pick = charged_law(kind, shape, mean), Random(5)
    drawn = np.array([draw_trials(law, pick.randrange) for _ in range(4000)])

    def fits(probabilities: oracle.Array) -> float:
        padded = np.append(probabilities, np.zeros(26))
        expected = np.append(padded[:25], padded[25:].sum()) * len(drawn)
        seen = np.bincount(np.minimum(drawn, 26), minlength=27)[1:]
        common = expected > 5
        counts = (
            np.append(seen[common], seen[~common].sum()),
            np.append(expected[common], max(expected[~common].sum(), 1e-3)),
        )
        return float(stats.chisquare(counts[0], counts[1] * counts[0].sum() / counts[1].sum()).pvalue)

    assert fits(oracle.law(kind, shape, mean).probabilities) > 1e-3
    assert fits(oracle.law(kind, shape, 1.3 * mean).probabilities) < 1e-6


def test_the_largest_uniform_number_ends_the_draw() -> None:
    for law in (BestOf(steps=1, mean=100.0), BestOf(steps=1, law="poisson", mean=100.0)):
        assert 100 < draw_trials(trial_count(law), lambda limit: limit - 1) < 20_000
        assert draw_trials(trial_count(law), lambda _: 0) == 1
