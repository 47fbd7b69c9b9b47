"""Sampled coordinates in the hockey-stick sense: no allocation is the worst, and none is undercharged.

The oracle convolves the logarithms of the coordinates' likelihood ratios on a fine grid. (A coordinate
of size g that takes part with chance p is a Poisson-sampled Gaussian mechanism, and coordinates compose:
dp-accounting checks the oracle.)
"""

import functools
import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as peer
from scipy.special import ndtr

import hush
from hush.accounting.epsilon import delta as charged_delta
from hush.accounting.epsilon import upper_epsilon
from hush.accounting.numerics import Array
from hush.accounting.pld import accountant
from hush.accounting.pld.jump_diffusion import _components, dominating_jump_diffusion
from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush.accounting.steps import SampledGaussian

Allocation = tuple[tuple[int, float], ...]
"""Numbers of coordinates, and the size of each in units of the noise."""


GRID = 2e-4 * np.arange(-(1 << 15), 1 << 15)


@functools.lru_cache
def exact_law(allocation: Allocation, p: float) -> tuple[Array, Array]:
    """Likelihood ratios of a record that takes part, and their chances without it.

    Per coordinate 1 - p + p exp(g z - g^2/2) by definition, its logarithm rounded to a grid so fine that
    delta is off by 1e-5 of itself at most; coordinates are multiplied by a Fourier transform.
    """
    spectrum: Any = 1.0
    edges = np.append(GRID, -GRID[0]) - 1e-4
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = np.log(np.maximum((np.exp(edges) - 1 + p) / p, 0.0))
    for count, size in allocation:
        chances = np.diff(ndtr(ratios / size + size / 2))
        spectrum = spectrum * np.fft.rfft(np.fft.ifftshift(chances)) ** count
    law = np.maximum(np.fft.fftshift(np.fft.irfft(spectrum, len(GRID))), 0.0)
    ratio = np.exp(GRID)
    return ratio / (law @ ratio), law


def sampled_delta(allocation: Allocation, p: float, q: float, epsilon: float) -> float:
    """Delta of one step that draws the record with chance q: the larger direction."""
    ratio, law = exact_law(allocation, p)
    mixed, z = 1 - q + q * ratio, math.exp(epsilon)
    return float(max(law @ np.maximum(mixed - z, 0.0), law @ np.maximum(1 - z * mixed, 0.0)))


def spread(length: float, count: int) -> tuple[int, float]:
    return count, length / math.sqrt(count)


def test_the_oracle_against_the_closed_form_and_a_peer() -> None:
    p, length = 1 / 3, 0.5
    assert sampled_delta(((1, length),), p, 1.0, 0.0) == pytest.approx(
        p * math.erf(length / math.sqrt(8)), rel=1e-5
    )
    pair = peer.from_gaussian_mechanism(4 / length, sampling_prob=p).self_compose(16)
    for epsilon in (0.0, 0.3):
        expected = pair.get_delta_for_epsilon(epsilon)
        assert sampled_delta(((16, length / 4),), p, 1.0, epsilon) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("p", "q", "length", "cap"),
    [(85 / 256, 1.0, 0.6, 0.15), (85 / 256, 0.06, 1.5, 0.3), (0.5, 0.2, 0.6, 0.15)],
)
def test_no_allocation_costs_more_than_is_charged(p: float, q: float, length: float, cap: float) -> None:
    step = dominating_jump_diffusion(q, p, [(cap, length)])
    assert step is not None
    full = round((length / cap) ** 2)
    allocations: list[Allocation] = [
        ((full, cap),),
        (spread(length, 4 * full),),
        (spread(length, 400),),
        ((full // 2, cap), spread(math.sqrt(length**2 - full // 2 * cap**2), 200)),
        ((1, cap), spread(math.sqrt(length**2 - cap**2), 300)),
    ]
    epsilons = [0.0, 0.05, 0.3, 1.0]
    deltas = accountant.profile_upper({step: 1}, epsilons)
    for epsilon, delta in zip(epsilons, deltas, strict=True):
        worst = [sampled_delta(allocation, p, q, epsilon) for allocation in allocations]
        # the transform is right to 1e-12 of everything
        assert max(worst) <= delta * (1 + 1e-6) + 1e-11
        if epsilon == 0:
            assert delta <= 1.1 * max(worst), "a charge of nothing in particular would pass"


def test_charging_only_the_sparsest_allocation_undercharges() -> None:
    p, length, cap = 0.5, 1.0, 0.5
    step = dominating_jump_diffusion(1.0, p, [(cap, length)])
    assert step is not None
    sparsest, spread_out = (sampled_delta((spread(length, count),), p, 1.0, 0.0) for count in (4, 2000))
    at_zero, at_one = accountant.profile_upper({step: 1}, [0.0, 1.0])
    assert sparsest < spread_out < at_zero
    # and charging only the mean shift does, where epsilon is large
    sparsest, spread_out = (sampled_delta((spread(length, count),), p, 1.0, 1.0) for count in (4, 2000))
    assert 1.5 * spread_out < sparsest < at_one


@pytest.mark.parametrize("multiplier", [0.2, 0.05])
def test_a_diffusion_of_many_jumps_loses_no_mass(multiplier: float) -> None:
    """The chance of no jump, of which all weights are multiples, is not a double here."""
    plan = hush.Plan(
        sampling=hush.Twice(rate=0.5, coordinate_rate=0.1),
        clipping=hush.L2Linf(l2=1.0, linf=5e-5),
        noise=hush.Gaussian(multiplier),
    )
    mean = accountant.epsilon({SampledGaussian(0.5, multiplier * 256 / 26): 1}, 1e-5)
    assert upper_epsilon({plan: 1}, 1e-5) > 0.999 * mean.lower
    assert (
        charged_delta({plan: 1}, 1.0).upper
        > 0.999 * accountant.delta({SampledGaussian(0.5, multiplier * 256 / 26): 1}, 1.0).lower
    )
    # the most jumps that are charged
    norm = 2.85
    step = dominating_jump_diffusion(0.5, 0.1, [(0.001, norm)])
    assert step is not None
    assert dominating_jump_diffusion(0.5, 0.1, [(0.001, 1.15 * norm)]) is None
    _, first, second = _components(step)
    assert (first.sum(), second.sum()) == (pytest.approx(1, abs=1e-11), pytest.approx(1, abs=1e-11))


@pytest.mark.parametrize(
    ("rate", "parts", "clipping", "steps", "multiplier", "page"),
    [
        (0.06, 3, hush.L2Linf(l2=1.0, linf=0.1), 1500, 2.0, (1.655, 1.544, 1.516)),
        (0.04, 2, hush.L2Linf(l2=1.0, linf=0.1), 1500, 1.9, (1.789, 1.665, 1.639)),
        (0.06, 3, hush.L2Linf(l2=1.0, linf=0.1), 5000, 1.2, (5.898, 5.595, 5.428)),
        (0.03, 3, hush.L2Linf(l2=1.0, linf=0.1), 1500, 1.2, (1.385, 1.301, 1.264)),
        (0.02, 2, hush.L2Linf(l2=1.0, linf=0.1), 2500, 0.9, (2.744, 2.593, 2.508)),
        (0.06, 3, hush.L2(1.0), 500, 1.3, (1.894, 1.831, 1.703)),
    ],
)
def test_the_table_of_the_page_is_what_is_charged(
    rate: float, parts: int, clipping: Any, steps: int, multiplier: float, page: tuple[float, ...]
) -> None:
    """docs/guarantees/twice-sampling-pld.md: by Rényi divergences, charged, and the lower end."""
    plan = hush.Plan(
        sampling=hush.Twice(rate=rate, coordinate_rate=1 / parts),
        clipping=clipping,
        noise=hush.Gaussian(multiplier),
    )
    orders = np.array([*range(2, 65), *range(68, 257, 4)], dtype=float)
    by_renyi = rdp_to_epsilon(steps * np.asarray(hush.rdp(plan, orders)), orders, 1e-5)
    charged = hush.epsilon(plan, steps, 1e-5).epsilon
    assert (by_renyi, charged.upper, charged.lower) == pytest.approx(page, abs=2e-3)
