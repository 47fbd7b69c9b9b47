"""The cost to search with: against sums in many digits, the accountant that charges, and differences."""

import math

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting.numerics import Array
from hush.accounting.rdp.coordinatewise import coordinatewise_rdp
from hush.accounting.rdp.profile import CoordinateRDP
from hush.accounting.shaping import BlockCost
from hush.core.parts import SensitivitySet

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


def printed(
    blocks: list[SensitivitySet], log_variances: Array, rate: float, inner: float, order: int
) -> float:
    """Theorem 5.6 as printed, in 40 digits."""
    with mpmath.workdps(40):
        outer = mpmath.mpf(0)
        for v in range(order + 1):
            product = mpmath.mpf(1)
            for block, log_variance in zip(blocks, log_variances, strict=True):
                top = min(block.norm, block.cap or block.norm)
                ratio = mpmath.mpf(top) ** 2 / mpmath.exp(log_variance) / 2
                moment = mpmath.fsum(
                    mpmath.binomial(v, k)
                    * (1 - mpmath.mpf(inner)) ** (v - k)
                    * mpmath.mpf(inner) ** k
                    * mpmath.exp(k * (k - 1) * ratio)
                    for k in range(v + 1)
                )
                product *= moment ** min(mpmath.mpf(block.size), (mpmath.mpf(block.norm) / top) ** 2)
            weight = mpmath.binomial(order, v) * (1 - mpmath.mpf(rate)) ** (order - v)
            outer += weight * mpmath.mpf(rate) ** v * product
        return float(mpmath.log(outer) / (order - 1))


@given(seed=st.integers(0, 10**6), rate=RATES, inner=RATES, order=st.integers(2, HIGHEST))
@settings(max_examples=60, deadline=None)
def test_the_printed_sum_in_many_digits(seed: int, rate: float, inner: float, order: int) -> None:
    blocks, log_variances = some_blocks(seed)
    for outer in (rate, 1.0):
        cost = BlockCost(blocks, outer, inner, HIGHEST, removal=False)
        expected = printed(blocks, log_variances, outer, inner, order)
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
