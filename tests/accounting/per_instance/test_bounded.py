"""Charges of plans with noise on a fixed support: at worst, and for the records at hand."""

import itertools

import numpy as np
import pytest

import hush
from hush.core.parts import Clipping, Noise, Sampling
from tests.accounting.per_instance import oracle

NOISES: tuple[Noise, ...] = (
    hush.Rectified(scale=0.8, bound=1.0),
    hush.Truncated(scale=0.8, bound=1.0),
    hush.StochasticSign(scale=0.8),
    hush.Quantized(scale=0.8, bound=1.0, levels=4),
)
KINDS = ("rectified", "truncated", "sign", "quantized")
ORDERS = [1.5, 2.0, 4.0, 20.0]


def plan(noise: Noise, clipping: Clipping | None = None, sampling: Sampling | None = None) -> hush.Plan:
    return hush.Plan(
        sampling=sampling or hush.FullBatch(), clipping=clipping or hush.Linf(0.5), noise=noise
    )


@pytest.mark.parametrize(("noise", "kind"), list(zip(NOISES, KINDS, strict=True)))
def test_for_all_it_is_the_worse_sign_and_the_larger_direction(noise: Noise, kind: str) -> None:
    location = [-2.0, 0.3]
    costs: dict[tuple[bool, int, int], float] = {}
    for j, at in enumerate(location):
        for sign in (-1, 1):
            pair = at / 0.8, (at + sign * 0.5) / 0.8
            for away in (False, True):
                first, second = pair if away else pair[::-1]
                cost = oracle.divergence(kind, 1 / 0.8, 4, first, second - first, 4.0, digits=16)
                costs[away, j, sign] = float(cost)
    direction = [
        sum(max(costs[away, j, sign] for sign in (-1, 1)) for j in (0, 1)) for away in (False, True)
    ]
    divergence = hush.individual_rdp(plan(noise), location, [4.0])[0]
    assert divergence == pytest.approx(max(direction), rel=1e-8)
    # what the paper's algorithm adds up: one sign, one direction
    assert sum(costs[True, j, 1] for j in (0, 1)) < 0.95 * divergence


@pytest.mark.parametrize("noise", NOISES)
def test_no_neighbour_costs_more_than_what_is_charged_for_all(noise: Noise) -> None:
    rng = np.random.default_rng(3)
    location = rng.normal(scale=1.5, size=6)
    change = rng.uniform(-0.5, 0.5, size=(50, 6))
    change[0] = 0.5
    divergences = hush.individual_rdp(plan(noise), location, ORDERS, change=change)
    assert divergences.shape == (50, 4)
    for_all = hush.individual_rdp(plan(noise), location, ORDERS)
    assert (divergences <= for_all * (1 + 1e-12)).all()
    # from the neighbour's point of view the two directions change places
    back = hush.individual_rdp(plan(noise), location + change[7], ORDERS, change=-change[7])
    assert back == pytest.approx(divergences[7], rel=1e-9)
    assert (for_all <= hush.rdp(plan(noise), ORDERS, dimension=6) * (1 + 1e-9)).all()


def test_a_change_of_many_records_by_hand() -> None:
    noise = hush.StochasticSign(scale=2.0)
    from scipy.stats import norm

    location, change, order = np.array([0.4, -3.0]), np.array([0.1, 0.7]), 3.0
    expected = []
    for p_at, q_at in ((location, location + change), (location + change, location)):
        p, q = norm.cdf(p_at / 2), norm.cdf(q_at / 2)
        moments = p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)
        expected.append(np.log(moments).sum() / (order - 1))
    divergence = hush.individual_rdp(plan(noise), location, [order], change=change)[0]
    assert divergence == pytest.approx(max(expected), rel=1e-8)


@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize(
    ("sampling", "clipping"),
    list(
        itertools.product(
            (hush.FullBatch(), hush.Poisson(0.1)),
            (hush.L2(0.5), hush.Linf(0.1), hush.L2Linf(l2=0.5, linf=0.2)),
        )
    ),
)
def test_at_worst_it_is_charged_as_the_normal_law(
    noise: Noise, sampling: Sampling, clipping: Clipping
) -> None:
    normal = hush.Gaussian(0.8 / clipping.reference_norm)
    ours, theirs = (
        hush.epsilon(plan(each, clipping, sampling), 3, 1e-5, dimension=30) for each in (noise, normal)
    )
    assert ours.epsilon.upper == theirs.epsilon.upper
    assert ours.epsilon.lower == 0, "the normal law's lower end is not this law's"
    assert not ours.sensitive


def test_the_worst_case_is_nearly_met_on_a_wide_support() -> None:
    """Where the charge at worst is not idle: records in the middle of a wide support."""
    wide = plan(hush.Rectified(scale=0.8, bound=8.0))
    at_worst = hush.rdp(wide, [2.0], dimension=5)
    assert hush.individual_rdp(wide, np.zeros(5), [2.0]) == pytest.approx(at_worst, rel=1e-6)
