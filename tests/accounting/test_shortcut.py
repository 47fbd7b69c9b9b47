"""Rough bounds are bounds: against the grid's, which share no more than the masses with them."""

import math

import pytest

from hush.accounting import pld, shortcut
from hush.accounting.loss import Direction, Step
from hush.accounting.mechanism import SampledGaussian, SampledNoise

COUNTS: list[dict[Step, int]] = [
    {SampledGaussian(0.1, 1.0): 100},
    {SampledNoise(1.0, 1.0, 5.0): 10},
    {SampledNoise(0.1, 1.5, 2.0): 30},
    {SampledNoise(0.1, 4.0, 3.0): 5, SampledGaussian(0.2, 2.0): 5},
]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("delta", [1e-20, 1e-5, 0.01])
def test_epsilon_is_no_less(counts: dict[Step, int], delta: float) -> None:
    assert pld.epsilon(counts, delta).lower <= shortcut.epsilon(counts, delta) < math.inf


@pytest.mark.parametrize("counts", COUNTS)
def test_distance_is_no_less(counts: dict[Step, int]) -> None:
    assert pld.delta(counts, 1e-9).lower <= shortcut.distance(counts)


def test_most_is_the_largest_loss_where_there_is_one() -> None:
    laplace: dict[Step, int] = {SampledNoise(1.0, 1.0, 4.0): 8}
    assert shortcut.most(laplace, Direction.REMOVE) == pytest.approx(2.0, rel=1e-11)
    assert shortcut.most(laplace, Direction.ADD) == pytest.approx(2.0, rel=1e-11)
    sampled: dict[Step, int] = {SampledNoise(0.25, 1.0, 1 / math.log(2)): 1}
    assert shortcut.most(sampled, Direction.REMOVE) == pytest.approx(math.log(1.25), rel=1e-11)
    assert shortcut.most(sampled, Direction.ADD) == pytest.approx(-math.log(0.875), rel=1e-11)
    normal: dict[Step, int] = {SampledGaussian(0.25, 1.0): 2}
    assert shortcut.most(normal, Direction.REMOVE) == math.inf
    assert shortcut.most(normal, Direction.ADD) == pytest.approx(-2 * math.log(0.75), rel=1e-11)


def test_losses_that_no_number_holds() -> None:
    counts: dict[Step, int] = {SampledNoise(0.5, 3.0, 1e-300): 10}
    assert shortcut.epsilon(counts, 1e-5) == math.inf
    assert shortcut.most({SampledNoise(1.0, 1.0, 1e-5): 1}, Direction.REMOVE) == pytest.approx(1e5)
