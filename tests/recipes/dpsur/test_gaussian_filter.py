"""The filter for Gaussian releases against the exact law of a run whose noise depends on its past."""

import math

import numpy as np
import pytest
from scipy import stats

import hush
from hush.accounting.epsilon import delta
from hush_recipes.dpsur.gaussian_filter import GaussianFilter

BUDGET = hush.Budget(epsilon=1.0, delta=1e-3)
# Sums over this grid are trapezoidal integrals of smooth densities: exact to many digits.
GRID = np.linspace(-9.0, 9.0, 721)


def two_releases(first: float, second: "dict[str, float]", epsilon: float) -> tuple[float, float]:
    """delta at epsilon, both directions, of a release of precision `first` and then one of precision
    second["below"] or second["above"], by whether the first came out below one half; 0 is to stop."""
    weight = stats.norm.pdf(GRID) * (GRID[1] - GRID[0])
    first_output, second_output = np.meshgrid(GRID, GRID, indexing="ij")
    deltas = []
    for sign in (1, -1):  # present first, then absent first
        total = 0.0
        # the first release is normal around 1 (present) or 0 (absent), in units of 1 / sqrt(precision)
        shift = math.sqrt(first) if sign == 1 else 0.0
        value = first_output + shift
        loss = sign * (math.sqrt(first) * value - first / 2)
        below = value < math.sqrt(first) / 2
        for side, precision in second.items():
            branch = below if side == "below" else ~below
            root = math.sqrt(precision)
            later = second_output + (root if sign == 1 else 0.0)
            losses = loss + sign * (root * later - precision / 2)
            gain = np.clip(-np.expm1(epsilon - losses), 0, None) * branch
            total += float(weight @ gain @ weight)
        deltas.append(total)
    return deltas[0], deltas[1]


@pytest.mark.parametrize("share", [0.2, 0.5])
@pytest.mark.parametrize("second_share", [0.0, 0.1, 0.4])
def test_whatever_a_run_does_within_the_budget_stays_within_it(
    share: float, second_share: float
) -> None:
    budget = GaussianFilter(BUDGET)
    whole = budget.precision
    assert budget.admit(share * whole)
    rest = budget.remaining
    for second in (
        {"below": rest, "above": second_share * whole},
        {"below": second_share * whole, "above": rest},
    ):
        for precision in second.values():
            assert precision == 0 or precision <= rest
        for epsilon in (0.3, 1.0):
            promised = delta({budget.plan: 1}, epsilon).upper
            assert max(two_releases(share * whole, second, epsilon)) <= promised * (1 + 2e-3)
    assert budget.guarantee(BUDGET.delta).epsilon.upper <= BUDGET.epsilon


def test_a_budget_that_is_used_to_the_end_on_every_course_is_attained() -> None:
    budget = GaussianFilter(BUDGET)
    second = {"below": 0.7 * budget.precision, "above": 0.7 * budget.precision}
    actual = max(two_releases(0.3 * budget.precision, second, 1.0))
    assert actual == pytest.approx(1e-3, rel=0.02)


def test_what_was_spent_in_the_end_is_no_guarantee() -> None:
    """An observer who is told "only this much was spent" knows which way the run went."""
    whole = GaussianFilter(BUDGET).precision
    adaptive = max(two_releases(0.2 * whole, {"below": 0.0, "above": 0.8 * whole}, 1.0))
    mu = math.sqrt(0.2 * whole)  # what a run that stopped early has spent
    claimed = stats.norm.cdf(mu / 2 - 1 / mu) - math.exp(1) * stats.norm.cdf(-mu / 2 - 1 / mu)
    assert adaptive > 10 * claimed


def test_a_filter_that_looks_afterwards_is_caught() -> None:
    """Releasing first and stopping once the budget is exceeded spends more than it."""
    whole = GaussianFilter(BUDGET).precision
    late = max(two_releases(0.6 * whole, {"below": 0.6 * whole, "above": 0.6 * whole}, 1.0))
    assert late > 1.3 * BUDGET.delta
    budget = GaussianFilter(BUDGET)
    assert budget.admit(0.6 * whole)
    assert not budget.admit(0.6 * whole)
    assert budget.remaining == pytest.approx(0.4 * whole)
