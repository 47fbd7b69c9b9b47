"""Noise of least variance: against brute force, closed forms, other covariances, and the accountant."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

import hush
from hush.accounting.numerics import Array
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush.accounting.rdp.coordinatewise import coordinatewise_rdp
from hush.accounting.rdp.profile import CoordinateRDP
from hush.accounting.steps import CoordinateWise, ellipsoid
from hush.core.parts import SensitivitySet
from hush_recipes.twice.search import BlockCost, scale_to_limit
from hush_recipes.twice.shape import LeastVarianceNoise, charged_variance, least_variance_noise
from tests.accounting.rdp.twice_oracle import printed


def ball(rank: int, l2: float, linf: float | None = None) -> SensitivitySet:
    return SensitivitySet(p=2.0, norm=l2, cap=linf, dimension=rank)


BUDGET = hush.Budget(epsilon=3.0, delta=1e-5)
PAPER = [
    ball(rank, l2, 0.1 * l2)
    for rank, l2 in [(250, 1.0), (500, 0.7), (1000, 0.6), (1500, 0.5), (288_648, 0.9)]
]
# few coordinates and little noise: here the closed form is not the optimum
FEW = [ball(2, 1.0), ball(40, 3.0, 0.6), ball(500, 0.5)]


def noise_for(
    blocks: Sequence[SensitivitySet], rate: float = 0.05, inner: float = 0.5, steps: int = 200
) -> LeastVarianceNoise:
    return least_variance_noise(blocks, rate=rate, coordinate_rate=inner, budget=BUDGET, steps=steps)


def epsilon(
    blocks: Sequence[SensitivitySet], deviations: Sequence[float], rate: float, inner: float, steps: int
) -> float:
    """Epsilon of the accountant, for any noise."""
    orders = np.arange(2.0, 33.0)
    step = CoordinateWise.normal(rate, tuple(zip(blocks, deviations, strict=True)), inner)
    divergences = step.rdp(orders)
    return rdp_to_epsilon(steps * divergences, orders, BUDGET.delta)


@pytest.mark.parametrize(("blocks", "steps"), [(PAPER, 1500), (FEW, 20)])
def test_the_noise_keeps_the_budget_and_wastes_none_of_it(
    blocks: list[SensitivitySet], steps: int
) -> None:
    noise = noise_for(blocks, steps=steps)
    charged = epsilon(blocks, noise.deviations, 0.05, 0.5, steps)
    assert 3.0 * (1 - 1e-3) <= charged <= 3.0
    less = [0.99 * deviation for deviation in noise.deviations]
    assert epsilon(blocks, less, 0.05, 0.5, steps) > 3.0
    assert noise.variance == pytest.approx(
        sum(block.size * s**2 for block, s in zip(blocks, noise.deviations, strict=True))
    )


def by_brute_force(
    tops: Array, moved: Array, ranks: Array, rate: float, inner: float, steps: int
) -> float:
    """The least variance of two blocks over a grid of shapes, from sums written out here."""
    orders = np.arange(2, 33)
    count = np.arange(33)
    inside = binom.pmf(count[None, :], np.arange(33)[:, None], inner)
    outside = binom.pmf(count[None, :], orders[:, None], rate)

    def charge(variances: Array) -> float:
        # what is cut off here is far beyond the budget at its order anyway
        exponents = np.minimum(count * (count - 1) / 2 * (tops**2 / variances)[:, None], 500.0)
        with np.errstate(over="ignore"):
            moments = np.minimum(np.prod((inside @ np.exp(exponents).T) ** moved, axis=1), 1e300)
        sums = outside @ moments
        sums += np.where(orders % 2, rate ** orders.astype(float) * (1 - rate), 0) * moments[2:]
        improved = np.log1p(-1 / orders) - (math.log(BUDGET.delta) + np.log(orders)) / (orders - 1)
        return float((steps * np.log(sums) / (orders - 1) + improved).min())

    best = math.inf
    for ratio in np.geomspace(0.02, 50, 400):
        shape = np.array([1.0, ratio])
        low, high = -3.0, 6.0
        for _ in range(40):
            middle = (low + high) / 2
            low, high = (middle, high) if charge(10**middle * shape) > BUDGET.epsilon else (low, middle)
        best = min(best, float(ranks @ (10**high * shape)))
    return best


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("blocks", "rate", "inner", "steps"),
    [
        ([ball(2, 1.0), ball(50, 2.0, 0.5)], 0.1, 0.5, 20),
        ([ball(300, 1.0), ball(9, 2.0, 1.0)], 0.05, 0.25, 100),
    ],
)
def test_brute_force_in_two_blocks(
    blocks: list[SensitivitySet], rate: float, inner: float, steps: int
) -> None:
    tops = np.array([min(block.norm, block.cap or block.norm) for block in blocks])
    moved = np.array([(block.norm / top) ** 2 for block, top in zip(blocks, tops, strict=True)])
    ranks = np.array([block.size for block in blocks])
    brute = by_brute_force(tops, moved, ranks, rate, inner, steps)
    noise = noise_for(blocks, rate, inner, steps)
    assert brute * (1 - 1e-3) <= noise.variance <= brute * (1 + 5e-4)


def test_closed_forms_are_tight_and_least_among_covariances() -> None:
    blocks = [ball(3, 2.0), ball(2, 0.5), ball(1, 1.0)]
    noise = least_variance_noise(blocks, rate=0.05, budget=BUDGET, steps=200)
    effective = ellipsoid(0.05, tuple(zip(blocks, noise.deviations, strict=True)))
    plain = least_variance_noise([ball(1, 1.0)], rate=0.05, budget=BUDGET, steps=200).deviations[0]
    assert effective.multiplier == pytest.approx(plain)
    rng = np.random.default_rng(1)
    ends = np.cumsum([block.size for block in blocks])[:-1]
    for trial in range(200):
        directions = rng.standard_normal((4000, 6))
        for part, block in zip(np.split(directions, ends, axis=1), blocks, strict=True):
            part *= block.norm / np.linalg.norm(part, axis=1, keepdims=True)
        best = np.diag(np.repeat(np.array(noise.deviations) ** 2, [block.size for block in blocks]))
        factor = rng.standard_normal((6, 6)) * (0.05 if trial % 2 else 1.0)
        covariance = factor @ factor.T + (best if trial % 2 else 0.01 * np.eye(6))
        # scaled to the same privacy: the largest s' covariance^-1 s over changes s that were tried
        worst = np.einsum("ki,ki->k", directions, np.linalg.solve(covariance, directions.T).T).max()
        assert np.trace(covariance) * worst * plain**2 > 0.97 * noise.variance


def test_theorem_4_5_for_a_box() -> None:
    sides = [0.1, 1.0, 3.0]
    noise = least_variance_noise([ball(1, side) for side in sides], rate=1.0, budget=BUDGET, steps=10)
    ratio = np.array(noise.deviations) ** 2 / np.array(sides)
    assert ratio == pytest.approx(np.full(3, ratio[0]))
    cube = least_variance_noise([ball(3, 100.0, 3.0)], rate=1.0, budget=BUDGET, steps=10)
    # proportional to the squared sum of sides
    assert noise.variance / cube.variance == pytest.approx((sum(sides) / 9.0) ** 2)


def test_sampled_coordinates_need_the_noise_that_is_charged() -> None:
    rate, inner, steps = 0.05, 0.5, 200
    for budget in (BUDGET, hush.Budget(epsilon=1e-3, delta=1e-5)):
        charged = charged_variance(
            PAPER[:1], rate=rate, coordinate_rate=inner, budget=budget, steps=steps
        )
        plan = hush.Plan(
            sampling=hush.Twice(rate=rate, coordinate_rate=inner),
            clipping=hush.L2Linf(l2=1.0, linf=0.1),
            noise=hush.Gaussian(math.sqrt(charged / 250)),
        )
        spent = hush.epsilon(plan, steps, budget.delta).epsilon
        assert 0.99 * budget.epsilon <= spent.upper <= budget.epsilon * (1 + 1e-9)
    # the second budget is more than Rényi divergences give with any noise, and the first is cheaper
    assert (
        charged_variance(PAPER[:1], rate=rate, coordinate_rate=inner, budget=BUDGET, steps=steps)
        < 0.95 * noise_for(PAPER[:1]).variance
    )


def variance(plan: hush.Plan) -> float:
    balls = plan.clipping.sensitivity(None)
    noises = plan.noise.per_block(balls, plan.clipping.reference_norm)
    return sum(
        block.size * (float(noise.to_plain()["multiplier"]) * norm) ** 2
        for block, (noise, norm) in zip(balls, noises, strict=True)
    )


HIGHEST = 12
RATES = st.floats(-2, -0.05).map(lambda power: 10**power)


def some_blocks(seed: int) -> tuple[list[SensitivitySet], Array]:
    """Blocks with and without an l-infinity bound, binding and not, and noise for them."""
    rng = np.random.default_rng(seed)
    blocks = []
    for _ in range(rng.integers(1, 4)):
        l2 = float(np.exp(rng.normal()))
        linf = [None, l2 * float(rng.uniform(0.05, 1.2))][rng.integers(2)]
        blocks.append(SensitivitySet(p=2.0, norm=l2, cap=linf, dimension=int(rng.integers(1, 60))))
    spread = np.array([block.l2_radius for block in blocks])
    return blocks, 2 * np.log(spread * np.exp(rng.uniform(-0.7, 1.5, len(blocks))))


@given(seed=st.integers(0, 10**6), rate=RATES, inner=RATES, order=st.integers(2, HIGHEST))
@settings(max_examples=60, deadline=None)
def test_the_printed_sum_in_many_digits(seed: int, rate: float, inner: float, order: int) -> None:
    blocks, log_variances = some_blocks(seed)
    deviations = np.exp(log_variances / 2)
    shifts = [(b.max_entries_moved, b.max_entry / d) for b, d in zip(blocks, deviations, strict=True)]
    for outer in (rate, 1.0):
        cost = BlockCost(blocks, outer, inner, HIGHEST, both_directions=False)
        expected = printed(order, shifts, outer, inner)
        assert cost.at(order, log_variances)[0] == pytest.approx(expected, rel=1e-10)


@given(seed=st.integers(0, 10**6), rate=RATES, inner=RATES)
@settings(max_examples=15, deadline=None)
def test_the_accountant_that_charges_any_law(seed: int, rate: float, inner: float) -> None:
    blocks, log_variances = some_blocks(seed)
    parts = [
        (
            CoordinateRDP(beta=2, scale=math.sqrt(2 * math.exp(log_variance)), rate=inner),
            SensitivitySet(p=2, norm=block.norm, cap=block.cap, dimension=block.size),
        )
        for block, log_variance in zip(blocks, log_variances, strict=True)
    ]
    orders = [2, 3, 7, 12]
    charged = coordinatewise_rdp(parts, rate, orders)
    cost = BlockCost(blocks, rate, inner, HIGHEST)
    divergences = np.array([value for value, _ in cost.at_all(orders, log_variances)])
    assert (charged >= divergences * (1 - 1e-9)).all()
    assert (charged <= divergences * (1 + 1e-3)).all()


@given(seed=st.integers(0, 10**6), rate=RATES, inner=RATES, order=st.integers(2, HIGHEST))
@settings(max_examples=60, deadline=None)
def test_slopes(seed: int, rate: float, inner: float, order: int) -> None:
    blocks, log_variances = some_blocks(seed)
    cost = BlockCost(blocks, rate, inner, HIGHEST)
    slopes = cost.at(order, log_variances)[1]
    for j, slope in enumerate(slopes):
        step = 1e-5 * np.eye(len(blocks))[j]
        up, down = cost.at(order, log_variances + step)[0], cost.at(order, log_variances - step)[0]
        assert slope == pytest.approx((up - down) / 2e-5, rel=1e-4)
        assert slope < 0


def test_no_noise_is_enough_at_an_odd_order_below_its_bound_for_add() -> None:
    cost = BlockCost(PAPER, 0.06, 1 / 3, 5)
    floor = cost.at(3, np.full(len(PAPER), 500.0))[0]
    assert floor > 0
    assert np.isinf(scale_to_limit(cost, 3, floor / 2, np.zeros(len(PAPER)))).all()
    scaled = scale_to_limit(cost, 3, 2 * floor, np.zeros(len(PAPER)))
    assert cost.at(3, scaled)[0] == pytest.approx(2 * floor, rel=1e-9)


@given(seed=st.integers(0, 10**6), rate=RATES, inner=RATES, order=st.integers(2, HIGHEST))
@settings(max_examples=100, deadline=None)
def test_convex_in_log_variances_and_in_precisions(
    seed: int, rate: float, inner: float, order: int
) -> None:
    blocks, first = some_blocks(seed)
    second = first + np.random.default_rng(seed + 1).uniform(-2, 2, len(first))
    for outer in (rate, 1.0):
        cost = BlockCost(blocks, outer, inner, HIGHEST)
        chord = (cost.at(order, first)[0] + cost.at(order, second)[0]) / 2
        assert cost.at(order, (first + second) / 2)[0] <= chord * (1 + 1e-12)
        precisions = (np.exp(-first) + np.exp(-second)) / 2
        assert cost.at(order, -np.log(precisions))[0] <= chord * (1 + 1e-12)
