"""Twice sampling against concrete records: no change in the sensitivity set costs more than is charged.

The laws are written out as mixtures of 2^k normal laws, one for each set of coordinates that take
part. Adding the record: a multinomial sum, exact. Removing it: an integral on a grid.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations_with_replacement, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import gammaln

from hush.accounting.numerics import Array
from hush.accounting.steps import CoordinateWise
from hush.core.parts import SensitivitySet

RATES = st.floats(-1.7, -0.02).map(lambda power: 10**power)
ORDERS = (2, 3, 4, 5, 6)


def mixture(change: Array, rate: float, inner: float) -> tuple[Array, Array]:
    """Weights and means of the law with the record, noise of deviation 1; mean 0 comes first."""
    masks = np.array(list(product([0, 1], repeat=len(change))))
    weights = rate * np.prod(np.where(masks == 1, inner, 1 - inner), axis=1)
    weights[0] += 1 - rate
    return weights, masks * change


@lru_cache
def compositions(parts: int, order: int) -> tuple[Array, Array]:
    """How often each of `parts` occurs among `order` draws, and the log-multinomials."""
    draws = list(combinations_with_replacement(range(parts), order))
    counts = np.array([np.bincount(draw, minlength=parts) for draw in draws])
    return counts, gammaln(order + 1) - gammaln(counts + 1).sum(axis=1)


def added(change: Array, rate: float, inner: float, order: int) -> float:
    """D_a of the law with the record from that without: E of a product of a exponentials, expanded."""
    weights, means = mixture(change, rate, inner)
    counts, log_ways = compositions(len(weights), order)
    together = counts @ means
    exponent = ((together**2).sum(axis=1) - counts @ (means**2).sum(axis=1)) / 2
    return float(np.logaddexp.reduce(log_ways + counts @ np.log(weights) + exponent)) / (order - 1)


def removed(change: Array, rate: float, inner: float, order: int) -> float:
    """D_a of the law without the record from that with it, on a grid (1 or 2 coordinates)."""
    weights, means = mixture(change, rate, inner)
    reach, spacing = 9.0, 0.15
    sides = [reach + order * abs(s) for s in change]
    axes = [np.arange(-side, side, spacing) for side in sides]
    x = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, len(change))
    log_without = -(x**2).sum(axis=1) / 2 - len(change) / 2 * math.log(2 * math.pi)
    log_ratio = np.logaddexp.reduce(np.log(weights) + x @ means.T - (means**2).sum(axis=1) / 2, axis=1)
    log_terms = log_without + (1 - order) * log_ratio + len(change) * math.log(spacing)
    return float(np.logaddexp.reduce(log_terms)) / (order - 1)


def charged(
    blocks: Sequence[SensitivitySet], deviations: Sequence[float], rate: float, inner: float, order: int
) -> float:
    step = CoordinateWise.normal(rate, tuple(zip(blocks, deviations, strict=True)), inner)
    return float(step.rdp(np.array([order]))[0])


def member(raw: Array, blocks: Sequence[SensitivitySet]) -> Array:
    """The change in the sensitivity set that any vector is clipped to: l2 first, then each entry."""
    ends = np.cumsum([block.size for block in blocks])[:-1]
    clipped = []
    for part, block in zip(np.split(raw, ends), blocks, strict=True):
        scaled = part * min(1.0, block.norm / max(float(np.linalg.norm(part)), 1e-300))
        top = math.inf if block.cap is None else block.cap
        clipped.append(np.clip(scaled, -top, top))
    return np.concatenate(clipped)


def setting(seed: int, coordinates: int) -> tuple[list[SensitivitySet], Array]:
    """Random blocks of that many coordinates in all, and noise for each block."""
    rng = np.random.default_rng(seed)
    ranks = [coordinates] if rng.random() < 0.5 else [1, coordinates - 1]
    blocks = []
    for rank in ranks:
        l2 = float(np.exp(rng.uniform(-1, 0.5)))
        linf = None if rng.random() < 0.3 else l2 * float(rng.uniform(0.3, 1.1))
        blocks.append(SensitivitySet(p=2.0, norm=l2, cap=linf, dimension=rank))
    return blocks, np.exp(rng.uniform(-0.5, 1.0, len(blocks)))


@given(seed=st.integers(0, 10**6), rate=RATES, inner=RATES, order=st.sampled_from(ORDERS))
@settings(max_examples=40, deadline=None)
def test_no_record_costs_more_than_is_charged(seed: int, rate: float, inner: float, order: int) -> None:
    for coordinates in (2, 3):
        blocks, deviations = setting(seed, coordinates)
        spread = np.repeat(deviations, [block.size for block in blocks])
        bound = charged(blocks, deviations.tolist(), rate, inner, order)

        def cost(raw: Array, blocks: list[SensitivitySet] = blocks, spread: Array = spread) -> float:
            return added(member(raw, blocks) / spread, rate, inner, order)

        rng = np.random.default_rng(seed + 1)
        candidates = [rng.standard_normal(coordinates) * np.exp(rng.uniform(-1, 2)) for _ in range(12)]
        candidates += [np.full(coordinates, 1e3), np.eye(coordinates)[0] * 1e3]
        best = max(candidates, key=cost)
        optimum = minimize(lambda raw: -cost(raw), best, method="Nelder-Mead", options={"maxfev": 60})
        worst = member(np.asarray(optimum.x), blocks)
        assert max(cost(best), cost(worst)) <= bound * (1 + 1e-9)
        if coordinates == 2:
            for raw in (*candidates[:4], best, worst):
                assert removed(member(raw, blocks) / spread, rate, inner, order) <= bound * (1 + 1e-9)


# two blocks in which the bounds are met by whole numbers of coordinates: 2 at 0.7, and 1 at 1
EXACT = [
    SensitivitySet(p=2.0, norm=0.7 * math.sqrt(2), cap=0.7, dimension=3),
    SensitivitySet(p=2.0, norm=1.0, dimension=1),
]
NOISE = [0.8, 1.1]
WORST = np.array([0.7, 0.7, 0.0, 1.0]) / np.array([0.8, 0.8, 0.8, 1.1])


@pytest.mark.parametrize("order", [2, 4])
def test_the_worst_record_costs_what_is_charged(order: int) -> None:
    bound = charged(EXACT, NOISE, 0.2, 0.5, order)
    assert bound == pytest.approx(added(WORST, 0.2, 0.5, order), rel=1e-3)


def test_broken_charges_are_caught() -> None:
    rate, inner, order = 0.2, 0.5, 4
    attack = added(WORST, rate, inner, order)
    halved = [SensitivitySet(p=2.0, norm=0.7, cap=0.7, dimension=3), EXACT[1]]
    broken = {
        "half as many coordinates": charged(halved, NOISE, rate, inner, order),
        "the coordinate rate twice": charged(EXACT, NOISE, rate, inner**2, order),
        "input sampling as if it were coordinate sampling": charged(
            EXACT, NOISE, 1.0, rate * inner, order
        ),
        "one block alone": charged(EXACT[:1], NOISE[:1], rate, inner, order),
        "one deviation for all blocks": charged(EXACT, [max(NOISE)] * 2, rate, inner, order),
    }
    for what, bound in broken.items():
        assert attack > 1.01 * bound, what


@pytest.mark.parametrize("order", [2, 3, 5])
def test_the_two_routes_agree_where_both_go(order: int) -> None:
    # with everyone taking part a reflection swaps the laws: both directions cost order / 2 s^2
    change = np.array([0.6, 0.4])
    exact = order / 2 * float(change @ change)
    assert removed(change, 1 - 1e-12, 1 - 1e-12, order) == pytest.approx(exact, rel=1e-6)
    assert added(change, 1 - 1e-12, 1 - 1e-12, order) == pytest.approx(exact, rel=1e-6)
    # and in one coordinate, sampled, against the sum over who takes part
    log_moment = math.log(
        sum(
            math.comb(order, k) * 0.9 ** (order - k) * 0.1**k * math.exp(k * (k - 1) / 2 * 0.36)
            for k in range(order + 1)
        )
    )
    assert added(np.array([0.6]), 0.2, 0.5, order) == pytest.approx(log_moment / (order - 1), rel=1e-12)
