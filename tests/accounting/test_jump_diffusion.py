"""Convex order of jump diffusions above coordinate-sampled shifts, against integrals over the noise."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import norm, poisson

from hush.accounting.numerics import Array
from hush.accounting.pld.jump_diffusion import (
    KILLING,
    JumpDiffusion,
    best_jump,
    dominates,
    dominating_diffusion,
)

NOISE = np.linspace(-12.0, 12.0, 40_001)
WEIGHTS = norm.pdf(NOISE) * (NOISE[1] - NOISE[0])


def calls_of_shift(rate: float, size: float, strikes: Array) -> Array:
    """E (L - K)+ by the definition of L, a sum over the noise."""
    ratio = 1 - rate + rate * np.exp(math.sqrt(size) * NOISE - size / 2)
    return np.array([WEIGHTS @ np.maximum(ratio - strike, 0.0) for strike in strikes])


def calls_of_diffusion(diffusion: JumpDiffusion, size: float, strikes: Array) -> Array:
    """E (N - K)+ and the chance of an infinite loss: sums over noise and numbers of jumps."""
    mean = diffusion.intensity * size
    spread = math.sqrt(diffusion.variance * size)
    total = np.full(len(strikes), -math.expm1(-KILLING * size))
    for jumps in range(math.ceil(mean + 12 * math.sqrt(mean)) + 20):
        drift = jumps * diffusion.jump - mean * math.expm1(diffusion.jump) - KILLING * size
        ratio = np.exp(spread * NOISE - spread**2 / 2 + drift)
        calls = [WEIGHTS @ np.maximum(ratio - strike, 0.0) for strike in strikes]
        total += poisson.pmf(jumps, mean) * np.array(calls)
    return total


def diffusion_for(rate: float, shift: float) -> JumpDiffusion:
    diffusion = dominating_diffusion(rate, shift, best_jump(rate, shift))
    assert diffusion is not None
    return diffusion


def excess(diffusion: JumpDiffusion, rate: float, size: float) -> Array:
    """How far the diffusion's call prices are above the shift's, relatively, from strike to strike."""
    places = np.linspace(-4.0, 6.0, 41)
    strikes = 1 - rate + rate * np.exp(math.sqrt(size) * places - size / 2)
    shifted = calls_of_shift(rate, size, strikes)
    return np.asarray((calls_of_diffusion(diffusion, size, strikes) - shifted) / shifted)


@pytest.mark.parametrize(
    ("rate", "shift"), [(1 / 256, 0.1), (85 / 256, 0.05), (85 / 256, 0.5), (0.5, 0.2), (0.9, 0.1)]
)
def test_no_shift_up_to_the_largest_tells_more(rate: float, shift: float) -> None:
    diffusion = diffusion_for(rate, shift)
    for share in (1.0, 0.81, 0.3, 0.05, 1e-3, 1e-5):
        assert (excess(diffusion, rate, share * shift**2) >= -1e-7).all()


def test_jumps_are_needed_and_as_many_as_there_are() -> None:
    rate, shift = 85 / 256, 0.1
    diffusion = diffusion_for(rate, shift)
    assert dominates(diffusion, rate, shift)
    assert dominates(diffusion, rate, shift / 3), "what dominates a shift dominates smaller ones"
    for broken in (
        dataclasses.replace(diffusion, intensity=0.97 * diffusion.intensity),
        dataclasses.replace(diffusion, intensity=0.0),
        dataclasses.replace(diffusion, variance=rate**2),
        dataclasses.replace(diffusion, variance=rate**2 * 1.004),
    ):
        assert not dominates(broken, rate, shift)
    assert not dominates(diffusion, rate, 1.1 * shift)
    # the refusals are not mere caution
    half = dataclasses.replace(diffusion, intensity=diffusion.intensity / 2)
    assert excess(half, rate, shift**2).min() < -1e-3
    narrow = dataclasses.replace(diffusion, variance=0.98 * rate**2)
    assert excess(narrow, rate, 1e-4 * shift**2).min() < -1e-3


@pytest.mark.parametrize(("rate", "shift"), [(85 / 256, 0.05), (0.5, 0.1)])
def test_the_diffusion_costs_little_more_than_what_it_dominates(rate: float, shift: float) -> None:
    # the cost of a diffusion over the mean shift: .73 (1 - p) u in the limit, and 0.6% of grids
    found = diffusion_for(rate, shift)
    over = (found.variance + found.intensity * math.expm1(found.jump) ** 2) / rate**2 - 1
    assert 0.7 * (1 - rate) * shift < over < 0.8 * (1 - rate) * shift + 0.008


def test_shifts_that_nothing_was_certified_for_get_no_diffusion() -> None:
    # in units so small that jumps would have to be countless
    assert dominating_diffusion(0.5, 1.0, 1e-3) is None
    assert dominating_diffusion(255.9 / 256, 0.1, 0.1) is None
