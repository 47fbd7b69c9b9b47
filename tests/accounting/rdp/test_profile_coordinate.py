"""Coordinate sampling in one dimension, both directions."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting.numerics import Array
from hush.accounting.rdp.profile import CoordinateRDP

BETAS = st.one_of(st.sampled_from([1.0, 2.0, 2.33, 4.0]), st.floats(1, 4))
ORDERS = st.floats(-1, 1.2).map(lambda power: 1 + 10**power)
SHIFTS = st.floats(-1.3, 0.3).map(lambda power: 10**power)
RATES = st.floats(-2.5, -0.01).map(lambda power: 10**power)


def mixture(beta: float, shift: float, rate: float) -> tuple[Array, Array]:
    """Masses of the law at 0 on a fine grid, and the ratio of the mixture to it less 1."""
    far = 75 ** (1 / beta)
    x = np.concatenate([np.linspace(-far, 0, 20_001), np.linspace(0, shift, 20_001)[1:]])
    x = np.concatenate([x, np.linspace(shift, shift + 2 * far, 60_001)[1:]])
    gaps = np.diff(x)
    width = (np.append(gaps, 0) + np.append(0, gaps)) / 2
    mass = np.exp(-(np.abs(x) ** beta)) * width / 2 / math.gamma(1 + 1 / beta)
    return mass, rate * np.expm1(np.abs(x) ** beta - np.abs(x - shift) ** beta)


def directions(beta: float, order: float, shift: float, rate: float) -> tuple[float, float]:
    """D_a of the mixture from the law, and of the law from the mixture."""
    mass, w = mixture(beta, shift, rate)
    forward, backward = (
        float(mass @ ((1 + w) ** power - 1 - power * w)) for power in (order, 1 - order)
    )
    return math.log1p(forward) / (order - 1), math.log1p(backward) / (order - 1)


def covers(cost: float, divergences: tuple[float, float]) -> bool:
    return cost >= max(divergences) * (1 - 1e-6)


@given(beta=BETAS, order=ORDERS, shift=SHIFTS, rate=RATES)
@settings(max_examples=60, deadline=None)
def test_it_covers_both_directions_and_is_the_mixtures(
    beta: float, order: float, shift: float, rate: float
) -> None:
    # scaled down so that the far peak of high orders stays on the oracle's grid
    shift /= max(1.0, order * (beta - 1))
    cost = float(CoordinateRDP(beta=beta, scale=1.0, rate=rate)(order, shift))
    forward, backward = directions(beta, order, shift, rate)
    assert covers(cost, (forward, backward))
    assert backward <= forward * (1 + 1e-6)
    assert cost == pytest.approx(forward, rel=1e-4)


def test_charging_the_wrong_direction_is_caught() -> None:
    divergences = directions(1.5, 8.0, 1.0, 0.1)
    assert covers(float(CoordinateRDP(beta=1.5, scale=1.0, rate=0.1)(8.0, 1.0)), divergences)
    assert not covers(divergences[1], divergences)


@given(
    order=st.integers(2, 60),
    shift=st.floats(-3, 1).map(lambda power: 10**power),
    rate=RATES,
    scale=st.floats(0.3, 5),
)
@settings(max_examples=40, deadline=None)
def test_normal_noise_at_whole_orders(order: int, shift: float, rate: float, scale: float) -> None:
    with mp.workdps(40):
        q, s = mp.mpf(rate), mp.mpf(shift) / mp.mpf(scale)
        terms = (
            mp.binomial(order, v) * (1 - q) ** (order - v) * q**v * mp.exp(v * (v - 1) * s**2)
            for v in range(order + 1)
        )
        truth = float(mp.log(mp.fsum(terms)) / (order - 1))
    law = CoordinateRDP(beta=2, scale=scale, rate=rate)
    divergence = float(law(order, shift))
    # float(shift) / float(scale) is itself rounded
    assert truth * (1 - 1e-14) <= divergence <= truth * (1 + 1e-11)
    by_quadrature = float(law([order, order + 0.5], shift)[0])
    assert truth * (1 - 1e-14) <= by_quadrature <= truth * (1 + 1e-8)
