"""Input sampling: both directions, on discrete pairs of laws where every sum is exact."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting.numerics import Array
from hush.accounting.rdp.coordinatewise import subsampled_rdp

HIGHEST = 9
ORDERS = np.arange(2, HIGHEST + 1)
RATES = st.floats(-2, -0.02).map(lambda power: 10**power)


def divergence(first: Array, second: Array) -> Array:
    """D_a at the orders 2, 3, ... of one discrete law from another."""
    log_ratio = np.log(first) - np.log(second)
    return np.array([np.log(second @ np.exp(a * log_ratio)) / (a - 1) for a in ORDERS])


def bounds(base: Array, rate: float, *, swapped: bool) -> Array:
    return np.array([subsampled_rdp(base[:k], rate, swapped=swapped) for k in range(1, len(base) + 1)])


def covers(bound: Array, without: Array, with_record: Array, rate: float) -> bool:
    """Whether the bound is above both directions of the sampled pair."""
    mixed = (1 - rate) * without + rate * with_record
    larger = np.maximum(divergence(mixed, without), divergence(without, mixed))
    return bool((bound >= larger * (1 - 1e-9) - 1e-14).all())


def base(without: Array, with_record: Array) -> Array:
    forward, backward = divergence(with_record, without), divergence(without, with_record)
    larger: Array = np.maximum(np.maximum(forward, backward), 0)
    return larger


def swapped_pair(rng: np.random.Generator, size: int) -> tuple[Array, Array]:
    """A random law on an even number of points, and its mirror image."""
    without = rng.dirichlet(np.full(2 * size, rng.choice([0.3, 1.0, 5.0]))) + 1e-6
    without /= without.sum()
    return without, without[::-1]


@given(seed=st.integers(0, 10**6), size=st.integers(1, 4), rate=RATES)
@settings(max_examples=150, deadline=None)
def test_a_swapped_pair(seed: int, size: int, rate: float) -> None:
    without, with_record = swapped_pair(np.random.default_rng(seed), size)
    bound = bounds(base(without, with_record), rate, swapped=True)
    assert covers(bound, without, with_record, rate)
    mixed = (1 - rate) * without + rate * with_record
    assert bound == pytest.approx(divergence(mixed, without), rel=1e-6, abs=1e-12)
    ratio = with_record / without
    for odd in (3, 5, 7):
        assert without @ (ratio - 1) ** odd >= -1e-9 * (without @ np.abs(ratio - 1) ** odd)


@given(seed=st.integers(0, 10**6), size=st.integers(1, 2), rate=RATES, coordinate=RATES)
@settings(max_examples=150, deadline=None)
def test_sampled_coordinates(seed: int, size: int, rate: float, coordinate: float) -> None:
    rng = np.random.default_rng(seed)
    without, with_record = np.ones(1), np.ones(1)
    for _ in range(rng.integers(1, 5)):
        law, mirrored = swapped_pair(rng, size)
        without = np.outer(without, law).ravel()
        mixture = (1 - coordinate) * law + coordinate * mirrored
        with_record = np.outer(with_record, mixture).ravel()
    bound = bounds(base(without, with_record), rate, swapped=False)
    assert covers(bound, without, with_record, rate)
    ratio = with_record / without
    for odd in (3, 5, 7, 9):
        assert without @ (ratio - 1) ** odd >= -1e-9 * (without @ np.abs(ratio - 1) ** odd)


def test_a_base_of_one_direction_alone_is_caught() -> None:
    # the record makes one outcome a little likelier and the other ten times less likely
    without, with_record = np.array([0.9, 0.1]), np.array([0.99, 0.01])
    removal = divergence(with_record, without)
    for swapped in (True, False):
        assert not covers(bounds(removal, 0.5, swapped=swapped), without, with_record, 0.5)


@given(rate=RATES, costs=st.lists(st.floats(0, 5), min_size=1, max_size=12))
@settings(max_examples=60, deadline=None)
def test_less_sampling_costs_more_and_sampled_coordinates_most(rate: float, costs: list[float]) -> None:
    grown: Array = np.maximum.accumulate(np.array(costs))
    swapped, positive = (bounds(grown, rate, swapped=each) for each in (True, False))
    assert (swapped <= positive).all()
    assert (bounds(grown, rate / 2, swapped=True) <= swapped * (1 + 1e-9)).all()
    assert (swapped <= grown * (1 + 1e-9) + 1e-15).all()


def test_nothing_overflows() -> None:
    divergences = bounds(np.arange(2.0, 400.0) * 1e4, 1e-3, swapped=True)
    assert np.isfinite(divergences).all()
    assert divergences[-1] == pytest.approx(399e4 + 399 / 398 * math.log(1e-3), rel=1e-9)
    assert (bounds(np.full(60, 1e-14), 1e-3, swapped=True) > 0).all()
