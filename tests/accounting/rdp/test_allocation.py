"""The allocation lemma: tables, special cases, and adversaries that search for something worse."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting.numerics import Array
from hush.accounting.rdp.coordinatewise import ConcaveMajorant, worst_allocation
from hush.accounting.rdp.profile import CoordinateRDP
from hush.core.parts import SensitivitySet


def noise(beta: float, scale: float = 1.0, rate: float = 1.0) -> CoordinateRDP:
    return CoordinateRDP(beta=beta, scale=scale, rate=rate)


BETAS = st.sampled_from([1.0, 1.25, 1.75, 2.0, 2.33, 3.0, 4.0])
NORMS = st.sampled_from([1.0, 1.5, 2.0, 3.0])


# Spread over how many coordinates, and how much more than one-hot: scale 3, l_beta norm 1, order 2
@pytest.mark.parametrize(
    ("beta", "factors"),
    [(2.33, [1.08, 1.42, 2.53, 6.11]), (3.0, [1.16, 2.09, 8.02, 63.5]), (4.0, [1.08, 2.12, 14.4, 315])],
)
def test_the_cost_of_spreading_depends_on_the_dimension(beta: float, factors: list[float]) -> None:
    law = noise(beta, 3.0)
    one_hot = float(law(2, 1.0))
    for k, factor in zip([2, 16, 1000, 500_000], factors, strict=True):
        spread = k * float(law(2, k ** (-1 / beta))) / one_hot
        assert spread == pytest.approx(factor, rel=5e-3)
        allocation = worst_allocation(law, SensitivitySet(p=beta, norm=1, dimension=k), [2])
        # beta 4 in two coordinates: 0.94 and 0.71 cost a little more than two alike
        assert spread <= allocation[0] / one_hot <= spread * (1.011 if (beta, k) == (4, 2) else 1.001)


def dense_majorant(law: CoordinateRDP, ball: SensitivitySet, order: float) -> float:
    """d H^(C^p / d), from just below: the hull of a fine grid, by its definition."""
    assert ball.dimension is not None
    at = ball.norm**ball.p / ball.dimension
    y = np.unique(np.append(np.linspace(0, ball.max_entry**ball.p, 801), at))
    h = law(order, y ** (1 / ball.p))
    left, right = y <= at, y > at
    share = (at - y[left, None]) / (y[right] - y[left, None])
    mixed = (1 - share) * h[left, None] + share * h[right]
    return float(ball.dimension * mixed.max())


@pytest.mark.few(4)
@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0])
@pytest.mark.parametrize("beta", [1.0, 1.5, 3.0])
@pytest.mark.parametrize("rate", [1.0, 0.2])
def test_the_grid_is_rigorous_and_its_slack_small(p: float, beta: float, rate: float) -> None:
    law, ball = noise(beta, 1.0, rate), SensitivitySet(p=p, norm=1, cap=0.8, dimension=4)
    for order in (2.0, 12.0):
        truth = dense_majorant(law, ball, order)
        bound = float(worst_allocation(law, ball, [order])[0])
        assert truth * (1 - 1e-9) <= bound <= truth * (1 + 1e-3)


def lowest(law: CoordinateRDP, p: float, bend: float) -> float:
    """The least ratio of the majorant on a coarse grid to the cost, between its points."""
    order, grid = 5.0, np.array([0.05, 0.2, 0.5, 1.0])
    costs, ratios = law(order, grid), []
    for shift in np.linspace(0.06, 0.99, 60):
        cells = ConcaveMajorant(p, shift**p, grid, float(costs[0]), order, bend)
        cells.add_points(grid, costs)
        ratios.append(cells.upper() / float(law(order, shift)))
    return min(ratios)


@pytest.mark.parametrize(("p", "beta", "scale"), [(2.0, 2.33, 3.0), (2.33, 2.33, 4.0), (4.0, 4.0, 6.0)])
def test_between_grid_points_the_majorant_is_above_the_cost(p: float, beta: float, scale: float) -> None:
    law = noise(beta, scale)
    assert law.min_moment_curvature(5.0, 1.0) > 0
    assert lowest(law, p, law.min_moment_curvature(5.0, 1.0)) >= 1 - 1e-8


def test_a_bend_that_is_not_there_is_caught() -> None:
    law = noise(1.0, 2.0)
    assert lowest(law, 2.0, law.min_moment_curvature(5.0, 1.0)) >= 1 - 1e-8
    assert lowest(law, 2.0, 20 * law.fisher) < 0.999


def in_ball(rng: np.random.Generator, ball: SensitivitySet, dimension: int) -> Array:
    """A random change on the boundary of the ball, sparse or spread."""
    size = rng.exponential(size=dimension) ** rng.choice([0.05, 0.5, 2.0])
    size[rng.permutation(dimension)[rng.integers(1, dimension + 1) :]] = 0
    size *= ball.norm / (size**ball.p).sum() ** (1 / ball.p)
    capped: Array = np.minimum(size, ball.max_entry)
    return capped


def best_found(law: CoordinateRDP, ball: SensitivitySet, order: float, seed: int) -> float:
    """The most that random changes cost."""
    rng, dimension = np.random.default_rng(seed), ball.dimension or 40
    changes = np.array([in_ball(rng, ball, dimension) for _ in range(40)])
    return float(law(order, changes).sum(axis=1).max())


@given(
    beta=BETAS,
    p=NORMS,
    order=st.integers(2, 24),
    dimension=st.integers(1, 12),
    cap=st.floats(0.2, 1),
    rate=st.sampled_from([1.0, 0.3]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_no_random_change_beats_the_bound(
    beta: float, p: float, order: int, dimension: int, cap: float, rate: float, seed: int
) -> None:
    law, ball = noise(beta, 1.5, rate), SensitivitySet(p=p, norm=1, cap=cap, dimension=dimension)
    allocation = worst_allocation(law, ball, [order])
    assert best_found(law, ball, order, seed) <= allocation[0]


def test_charging_the_one_hot_change_alone_is_caught() -> None:
    law, ball = noise(4, 3.0), SensitivitySet(p=4, norm=1, dimension=12)
    best = best_found(law, ball, 2.0, 0)
    assert best > 1.5 * float(law(2, 1.0))
    assert best <= float(worst_allocation(law, ball, [2])[0]) <= 1.2 * best
