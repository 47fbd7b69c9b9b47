"""Privacy loss of sampled jump diffusions, against sums over noise and numbers of jumps."""

import math

import numpy as np
import pytest
from scipy.stats import norm, poisson

from hush.accounting.coordinates import dominating_jump_diffusion
from hush.accounting.numerics import Array
from hush.accounting.pld import accountant
from hush.accounting.pld.jump_diffusion import JumpDiffusionLaw
from hush.accounting.pld.lattice import pessimistic
from hush.accounting.pld.privacy_loss import Direction

NOISE = np.linspace(-11.0, 11.0, 6001)
WEIGHTS = norm.pdf(NOISE) * (NOISE[1] - NOISE[0])
LAWS = [
    JumpDiffusionLaw(0.05, 0.03, 0.08, ((1, 1.5),), 1e-13),
    JumpDiffusionLaw(1.0, 0.2, 0.05, ((1, 0.7), (4, 0.2)), 1e-13),
    JumpDiffusionLaw(0.3, 0.001, 0.3, ((2, 0.01),), 1e-13),
]


def outcomes(law: JumpDiffusionLaw) -> tuple[Array, Array]:
    """Log-likelihood ratios of the diffusion, and their chances without the record."""
    spread = math.sqrt(law.variance)
    ratios, chances = [spread * NOISE - law.variance / 2], [WEIGHTS]
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
    assert sum(mean for _, mean in many.law.jumps) > 150
    for direction in Direction:
        cut = many.law.cell_masses(direction, np.linspace(*many.law.loss_quantiles(direction, 1e-9), 50))
        assert cut.first.sum() == pytest.approx(1.0, abs=1e-9)
        assert cut.second.sum() == pytest.approx(1.0, abs=1e-9)
    # with more of them exp(-mean) would be 0, and with it every mass
    assert dominating_jump_diffusion(0.5, 0.5, [(0.02, 15.0)]) is None


def test_shifts_beyond_what_pays_have_no_diffusion() -> None:
    assert dominating_jump_diffusion(0.1, 0.5, [(2.0, 2.0)]) is None
    assert dominating_jump_diffusion(0.1, 0.5, [(0.0, 0.0)]) is None
    assert dominating_jump_diffusion(0.1, 0.5, [(1e-9, 1e-6)]) is None
