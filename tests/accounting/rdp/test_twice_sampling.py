"""Plans of blocks and of sampled coordinates: what they are charged, against independent sums."""

import math
from typing import Any

import pytest

import hush
from hush.accounting.epsilon import delta as charged_delta
from hush.accounting.mechanism import mechanism
from hush.accounting.steps import SampledGaussian
from hush.core.errors import InvalidValue, Unproved
from tests.accounting.rdp.twice_oracle import printed

DELTA = 1e-5


def plan(sampling: Any, clipping: Any, noise: Any) -> hush.Plan:
    return hush.Plan(sampling=sampling, clipping=clipping, noise=noise)


@pytest.mark.parametrize("order", [2, 4, 8])
@pytest.mark.parametrize(("q1", "q2"), [(0.06, 85 / 256), (0.3, 128 / 256), (1.0, 8 / 256)])
def test_twice_sampling_is_charged_by_the_theorems(order: int, q1: float, q2: float) -> None:
    sampling = hush.Twice(rate=q1, coordinate_rate=q2)
    capped = plan(sampling, hush.L2Linf(l2=2.0, linf=0.2), hush.Gaussian(0.8))
    expected = printed(order, [(100, 0.2 / 1.6)], q1, q2)
    assert hush.rdp(capped, [order])[0] == pytest.approx(expected, rel=2e-3)
    assert hush.rdp(capped, [order])[0] >= expected * (1 - 1e-9)
    two = plan(
        sampling,
        hush.Subspaces(ranks=(500, 4000), l2=(2.0, 1.0), linf=(0.5, 0.1)),
        hush.BlockGaussian(multipliers=(1.5, 0.9)),
    )
    expected = printed(order, [(16, 0.5 / 3.0), (100, 0.1 / 0.9)], q1, q2)
    assert hush.rdp(two, [order])[0] == pytest.approx(expected, rel=2e-3)
    assert hush.rdp(two, [order])[0] >= expected * (1 - 1e-9)


def test_without_thinning_one_number_decides() -> None:
    poisson = hush.Poisson(0.1)
    linf = plan(poisson, hush.Linf(0.5), hush.Gaussian(40.0))
    assert mechanism(linf, 100) == SampledGaussian(0.1, 4.0)
    cut = plan(poisson, hush.L2Linf(l2=1.0, linf=0.05), hush.Gaussian(2.0))
    assert mechanism(cut, 100) == SampledGaussian(0.1, 4.0), "the box is the smaller one"
    assert mechanism(cut, None) == SampledGaussian(0.1, 2.0)
    box = plan(poisson, hush.Box(bounds=(3.0, 4.0)), hush.Gaussian(2.5))
    assert mechanism(box, 2) == SampledGaussian(0.1, 2.0), "norm 5 and deviation 10"
    blocks = hush.Subspaces(ranks=(10, 90), l2=(3.0, 4.0))
    even = plan(poisson, blocks, hush.BlockGaussian(multipliers=(2.0, 2.0)))
    assert mechanism(even).multiplier == pytest.approx(math.sqrt(2))  # type: ignore[union-attr]
    plain = plan(poisson, blocks, hush.Gaussian(2.0))
    assert mechanism(plain).multiplier == pytest.approx(2.0)  # type: ignore[union-attr]
    whole = plan(hush.Twice(rate=0.1, coordinate_rate=1.0), blocks, hush.Gaussian(2.0))
    assert mechanism(whole) == mechanism(plain)


@pytest.mark.parametrize("coordinate_rate", [1 / 256, 1 / 3, 255 / 256])
def test_thinning_never_costs_and_the_ends_agree(coordinate_rate: float) -> None:
    clipping, noise = hush.L2Linf(l2=1.0, linf=0.3), hush.Gaussian(1.0)
    thinned = plan(hush.Twice(rate=0.05, coordinate_rate=coordinate_rate), clipping, noise)
    epsilon = hush.epsilon(thinned, steps=200, delta=DELTA).epsilon
    whole = hush.epsilon(plan(hush.Poisson(0.05), clipping, noise), 200, DELTA).epsilon
    assert epsilon.lower <= epsilon.upper <= whole.upper
    rate = 0.05 * hush.Coordinate(rate=coordinate_rate).rate
    plain = plan(hush.Poisson(rate), hush.L2(0.3), hush.Gaussian(1 / 0.3))
    assert epsilon.lower >= (1 - 1e-6) * hush.epsilon(plain, 200, DELTA).epsilon.lower
    at = charged_delta({thinned: 200}, epsilon.upper)
    # the grid of a delta is refined until its ends are within 1%
    assert at.lower <= DELTA
    assert at.upper <= DELTA * 1.01


def test_what_nobody_has_proved_is_refused() -> None:
    twice = hush.Twice(rate=0.1, coordinate_rate=0.5)
    for clipping, noise in (
        (hush.Lp(p=1.0, norm=1.0), hush.Laplace(1.0)),
        (hush.L2(1.0), hush.GeneralizedGaussian(beta=3.0, multiplier=1.0)),
        (hush.Lp(p=2.0, norm=1.0), hush.Gaussian(1.0)),
    ):
        with pytest.raises(Unproved, match="Twice"):
            mechanism(plan(twice, clipping, noise))
    for noise in (hush.Laplace(1.0), hush.GeneralizedGaussian(beta=2.0, multiplier=1.0)):
        with pytest.raises(Unproved, match="Linf"):
            mechanism(plan(hush.Poisson(0.1), hush.Linf(1.0), noise), 10)
    three = hush.BlockGaussian(multipliers=(1.0, 1.0, 1.0))
    with pytest.raises(InvalidValue, match="must have 2 numbers"):
        hush.epsilon(plan(twice, hush.Subspaces(ranks=(1, 2), l2=(1.0, 1.0)), three), 1, DELTA)


def test_block_noise_needs_blocks_that_say_their_size() -> None:
    """The noise would depend on the number of parameters; the charge is for any, or the largest."""
    sampling, noise = hush.Twice(rate=0.1, coordinate_rate=0.25), hush.BlockGaussian(multipliers=(1.0,))

    def cost(size: int) -> float:
        return float(hush.rdp(plan(sampling, hush.Box(bounds=((size, 0.1),)), noise), [4])[0])

    # fewer numbers under noise for their own longest change cost more, and L2Linf is charged for any
    capped = hush.L2Linf(l2=1.0, linf=0.1)
    as_charged = float(hush.rdp(plan(sampling, capped, hush.Gaussian(1.0)), [4])[0])
    assert cost(1) > 1.5 * as_charged
    assert cost(4) > 1.1 * as_charged
    assert cost(100) == pytest.approx(as_charged, rel=1e-3)
    for clipping in (capped, hush.Linf(0.1)):
        with pytest.raises(Unproved, match="BlockGaussian"):
            hush.rdp(plan(sampling, clipping, noise), [4], dimension=4)
    budget = hush.Budget(epsilon=1.0, delta=DELTA)
    noisy = plan(sampling, capped, hush.Gaussian(1.0))
    assert isinstance(hush.fit_noise(noisy, budget, steps=10).noise, hush.Gaussian)
