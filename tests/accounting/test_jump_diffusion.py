"""Jump diffusions: convex order and privacy loss, against sums over noise and numbers of jumps."""

import dataclasses
import math

import numpy as np
import pytest
from scipy.stats import norm, poisson

from hush.accounting.numerics import Array
from hush.accounting.pld import accountant
from hush.accounting.pld.jump_diffusion import (
    KILLING,
    JumpDiffusion,
    JumpDiffusionLaw,
    best_jump,
    dominates,
    dominating_diffusion,
    dominating_jump_diffusion,
)
from hush.accounting.pld.lattice import pessimistic
from hush.accounting.pld.privacy_loss import Direction

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


COARSE = np.linspace(-11.0, 11.0, 6001)
COARSE_WEIGHTS = norm.pdf(COARSE) * (COARSE[1] - COARSE[0])
LAWS = [
    JumpDiffusionLaw(0.05, 0.03, 0.08, ((1, 1.5),), 1e-13),
    JumpDiffusionLaw(1.0, 0.2, 0.05, ((1, 0.7), (4, 0.2)), 1e-13),
    JumpDiffusionLaw(0.3, 0.001, 0.3, ((2, 0.01),), 1e-13),
]


def outcomes(law: JumpDiffusionLaw) -> tuple[Array, Array]:
    """Log-likelihood ratios of the diffusion, and their chances without the record."""
    spread = math.sqrt(law.variance)
    ratios, chances = [spread * COARSE - law.variance / 2], [COARSE_WEIGHTS]
    for size, mean in law.jumps:
        counts = np.arange(math.ceil(mean + 12 * math.sqrt(mean)) + 12)
        moves = counts * size * law.jump - mean * math.expm1(size * law.jump)
        shares = poisson.pmf(counts, mean)
        ratios = [ratio + move for ratio in ratios for move in moves]
        chances = [chance * share for chance in chances for share in shares]
    return np.concatenate(ratios), np.concatenate(chances)


def hockey_stick(law: JumpDiffusionLaw, direction: Direction, epsilon: float) -> float:
    ratios, chances = outcomes(law)
    mixed = 1 - law.rate + law.rate * np.exp(ratios)
    if direction is Direction.REMOVE:
        return float(chances @ np.maximum(mixed - math.exp(epsilon), 0.0))
    return float(chances @ np.maximum(1 - math.exp(epsilon) * mixed, 0.0))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("direction", list(Direction))
def test_one_step_on_a_grid_is_no_less_than_the_sum(law: JumpDiffusionLaw, direction: Direction) -> None:
    low, high = law.loss_quantiles(direction, 1e-12)
    width = (high - low) / 2000
    lattice = pessimistic(law, direction, width, 1e-12)
    for epsilon in np.linspace(0.0, 0.9 * high, 7):
        gain = np.maximum(-np.expm1(epsilon - lattice.losses), 0.0)
        upper = float(lattice.masses @ gain) + lattice.infinite_mass
        exact = hockey_stick(law, direction, float(epsilon))
        # the sum over the noise is off by 1e-7 where the integrand has its kink
        assert exact * (1 - 1e-6) <= upper <= 1.03 * exact + 1e-11


def test_many_steps_without_sampling_are_one_longer_step() -> None:
    # a diffusion is multiplicative: ten times the squared shift is ten steps, exactly
    short = dominating_jump_diffusion(1.0, 0.5, [(0.05, 0.2)])
    long = dominating_jump_diffusion(1.0, 0.5, [(0.05, 0.2 * math.sqrt(10))])
    assert short is not None
    assert long is not None
    composed, single = accountant.epsilon({short: 10}, 1e-5), accountant.epsilon({long: 1}, 1e-5)
    assert composed.lower <= single.upper
    assert single.lower <= composed.upper
    assert composed.upper == pytest.approx(single.upper, rel=2e-3)


def test_as_many_jumps_as_are_allowed_keep_their_chances() -> None:
    many = dominating_jump_diffusion(0.5, 0.5, [(0.02, 7.5)])
    assert many is not None
    assert sum(mean for _, mean in many.jumps) > 150
    for direction in Direction:
        cut = many.cell_masses(direction, np.linspace(*many.loss_quantiles(direction, 1e-9), 50))
        assert cut.first.sum() == pytest.approx(1.0, abs=1e-9)
        assert cut.second.sum() == pytest.approx(1.0, abs=1e-9)
    # with more of them exp(-mean) would be 0, and with it every mass
    assert dominating_jump_diffusion(0.5, 0.5, [(0.02, 15.0)]) is None


def test_shifts_beyond_what_pays_have_no_diffusion() -> None:
    assert dominating_jump_diffusion(0.1, 0.5, [(2.0, 2.0)]) is None
    assert dominating_jump_diffusion(0.1, 0.5, [(0.0, 0.0)]) is None
    assert dominating_jump_diffusion(0.1, 0.5, [(1e-9, 1e-6)]) is None
