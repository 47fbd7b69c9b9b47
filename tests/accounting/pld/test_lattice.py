"""One step on a grid, against 40 digits: one lattice must dominate it, the other be dominated."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hush.accounting.numerics import Array
from hush.accounting.pld import accountant
from hush.accounting.pld import privacy_loss as loss
from hush.accounting.pld.lattice import SNAP, Lattice, optimistic, pessimistic
from hush.accounting.pld.laws import GeneralizedGaussianLaw
from hush.accounting.pld.privacy_loss import CellMasses, Direction
from hush.accounting.steps import PairedStep, SampledGaussian, SampledNoise
from tests.accounting.pld.oracle import exact

BOTH = list(Direction)


def curve(lattice: Lattice, epsilon: float) -> float:
    """delta of a lattice, from the definition."""
    gains = -np.expm1(np.minimum(epsilon - lattice.losses, 0.0))
    return float(lattice.masses @ gains) + lattice.infinite_mass


def brackets(
    low: Lattice, high: Lattice, step: PairedStep, direction: Direction, points: int = 61
) -> bool:
    """Whether the curves lie on either side of the true one, up to what `compose` pays for."""
    shift = 2 * SNAP
    if isinstance(step, SampledNoise):
        shift += 1e-14 * float(np.abs(high.losses[[0, -1]]).max())
    for epsilon in np.linspace(low.losses[0] - low.width, low.losses[-1], points):
        upper = exact(step, direction, float(epsilon) - shift)
        lower = exact(step, direction, float(epsilon) + shift)
        if not curve(low, epsilon) <= upper * (1 + 1e-12) + 1e-15:
            return False
        if not lower * (1 - 1e-12) - 1e-15 <= curve(high, epsilon):
            return False
    return True


BETAS = [1.0, 1.25, 2.0, 2.33, 4.0]
STEPS: list[tuple[PairedStep, float]] = [
    (SampledGaussian(0.001, 0.6), 1e-3),
    (SampledGaussian(0.01, 1.0), 1e-3),
    (SampledGaussian(0.2, 4.0), 5e-3),
    (SampledGaussian(0.001, 0.3), 3e-3),
    (SampledGaussian(1e-5, 0.6), 1e-3),
    (SampledGaussian(0.5, 0.5), 0.05),
    (SampledGaussian(1.0, 1.5), 0.02),
    (SampledGaussian(0.999, 2.0), 0.02),
    (SampledGaussian(1e-4, 20.0), 1e-6),
    *((SampledNoise(rate, beta, 1.3), 0.02) for rate in (1.0, 0.5, 0.01) for beta in BETAS),
]


@pytest.mark.few(20)
@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize(("step", "width"), STEPS)
def test_the_true_curve_lies_between(step: PairedStep, width: float, direction: Direction) -> None:
    low, high = (make(step, direction, width, 1e-12) for make in (optimistic, pessimistic))
    assert (low.masses >= 0).all()
    assert (high.masses >= 0).all()
    assert brackets(low, high, step, direction, points=61 if isinstance(step, SampledGaussian) else 25)


@given(
    rate=st.floats(-6, 0).map(lambda power: 10**power),
    multiplier=st.floats(-0.7, 1.5).map(lambda power: 10**power),
    relative=st.floats(-2.5, 0.5).map(lambda power: 10**power),
    direction=st.sampled_from(BOTH),
)
# Grids far too coarse, where bins merge and points are left out: both once broke `below`.
@example(rate=1.0, multiplier=1.0, relative=10**0.5, direction=Direction.ADD)
@example(rate=10**-1.5, multiplier=1.0, relative=10**0.5, direction=Direction.REMOVE)
@settings(max_examples=60, deadline=None)
def test_the_true_curve_lies_between_on_any_grid(
    rate: float, multiplier: float, relative: float, direction: Direction
) -> None:
    step = SampledGaussian(rate, multiplier)
    width = max(relative * min(1.0, rate / multiplier), 3e-5)
    low, high = (make(step, direction, width, 1e-12) for make in (optimistic, pessimistic))
    assert brackets(low, high, step, direction)


@given(
    rate=st.floats(-4, 0).map(lambda power: 10**power),
    beta=st.one_of(st.just(1.0), st.floats(1, 6)),
    scale=st.floats(-0.5, 1.5).map(lambda power: 10**power),
    relative=st.floats(-2, 0.5).map(lambda power: 10**power),
    direction=st.sampled_from(BOTH),
)
@settings(max_examples=40, deadline=None)
def test_the_true_curve_of_scalar_noise_lies_between_on_any_grid(
    rate: float, beta: float, scale: float, relative: float, direction: Direction
) -> None:
    step = SampledNoise(rate, beta, scale)
    width = max(relative * min(1.0, rate / scale), 3e-4)
    low, high = (make(step, direction, width, 1e-12) for make in (optimistic, pessimistic))
    assert brackets(low, high, step, direction, points=9)


def unfused(step: SampledGaussian, direction: Direction, width: float) -> Lattice:
    """The tempting lower bound: every bin's mass on its grid point, not fused."""
    model = optimistic(step, direction, width, 1e-12)
    masses = step.cell_masses(direction, model.losses[:-1] + width / 2).first
    return Lattice(model.origin, model.first, width, masses)


@pytest.mark.parametrize("direction", BOTH)
def test_bins_that_are_not_fused_are_no_lower_bound(direction: Direction) -> None:
    step = SampledGaussian(0.2, 1.0)
    high = pessimistic(step, direction, 0.05, 1e-12)
    assert not brackets(unfused(step, direction, 0.05), high, step, direction)


@pytest.mark.parametrize("direction", BOTH)
def test_noise_five_percent_too_large_is_no_upper_bound(direction: Direction) -> None:
    step, off = SampledGaussian(0.2, 1.0), SampledGaussian(0.2, 1.05)
    low, high = optimistic(step, direction, 0.01, 1e-12), pessimistic(off, direction, 0.01, 1e-12)
    assert not brackets(low, high, step, direction)


@pytest.mark.parametrize("direction", BOTH)
def test_masses_between_cuts_have_relative_accuracy_in_the_tails(direction: Direction) -> None:
    step = SampledGaussian(0.3, 1.0)
    cuts: Array = np.array([-0.35, -0.2, 0.0, 0.2, 0.3])
    masses = step.cell_masses(direction, cuts)
    sign = 1 if direction is Direction.REMOVE else -1
    with mp.workdps(40):
        edges = sorted(
            mp.log((mp.exp(sign * mp.mpf(float(cut))) - mp.mpf(0.7)) / mp.mpf(0.3)) + 0.5 for cut in cuts
        )
        null = [mp.ncdf(b) - mp.ncdf(a) for a, b in pairwise(edges)]
        if sign < 0:
            null.reverse()
        law = masses.second if direction is Direction.REMOVE else masses.first
        assert law[1:-1] == pytest.approx([float(mass) for mass in null], rel=1e-13)


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("width", [0.02, 1.0])
def test_rounding_of_the_masses_is_paid_for(
    direction: Direction, width: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every tail off by 1e-6, in turns; on the wide grid, tails fall by much from point to point."""
    step, size = SampledGaussian(0.5, 3.0), 1e-6
    true = {make: make.__wrapped__(step, direction, width, 1e-12) for make in (pessimistic, optimistic)}

    exact_masses = loss.SampledPair.cell_masses

    def rounded(sign: int) -> Callable[[loss.SampledPair, Direction, Array], CellMasses]:
        def perturbed(law: loss.SampledPair, direction: Direction, cuts: Array) -> CellMasses:
            cut = exact_masses(law, direction, cuts)
            turns = sign * size * (-1.0) ** np.arange(len(cut.first))
            first, second = (
                -np.diff(np.append(np.cumsum(law[::-1])[::-1] * (1 + turn), 0.0))
                for law, turn in ((cut.first, turns), (cut.second, -turns))
            )
            error = np.full(len(cut.first), 4 * size)
            return CellMasses(np.maximum(first, 0), np.maximum(second, 0), error)

        return perturbed

    for sign in (-1, 1):
        monkeypatch.setattr(loss.SampledPair, "cell_masses", rounded(sign))
        high, low = (
            make.__wrapped__(step, direction, width, 1e-12) for make in (pessimistic, optimistic)
        )
        for epsilon in high.losses:
            assert curve(high, epsilon) >= curve(true[pessimistic], epsilon) * (1 - 1e-9)
            assert curve(low, epsilon) <= curve(true[pessimistic], epsilon)


@pytest.mark.few(5)
@pytest.mark.parametrize("rate", [1.0, 0.5, 0.01])
@pytest.mark.parametrize("beta", [*BETAS[:-1], pytest.param(BETAS[-1], marks=pytest.mark.slow)])
def test_delta_of_one_step(beta: float, rate: float) -> None:
    step = SampledNoise(rate, beta, 1.3)
    for epsilon in (1e-3, 0.05, 0.3, 0.7, 2.0):
        truth = max(exact(step, direction, epsilon) for direction in BOTH)
        bound = accountant.delta({step: 1}, epsilon)
        assert bound.lower <= truth * (1 + 1e-9)
        assert truth * (1 - 1e-9) <= bound.upper
        assert bound.upper <= 1.02 * truth + 1e-12


@dataclass(frozen=True)
class _WrongTail(GeneralizedGaussianLaw):
    """A law whose masses are those of another power."""

    def survival(self, noise: Array) -> Array:
        return GeneralizedGaussianLaw(1.05 * self.beta, self.scale).survival(noise)


@dataclass(frozen=True)
class _Broken(SampledNoise):
    """A step that forgets which power its noise has."""

    @property
    def noise(self) -> GeneralizedGaussianLaw:
        return _WrongTail(self.beta, self.scale)


@pytest.mark.few(4)
@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("beta", BETAS)
def test_another_law_is_seen(beta: float, direction: Direction) -> None:
    step, width = SampledNoise(0.5, beta, 1.0), 0.01
    low, high = (make(step, direction, width, 1e-12) for make in (optimistic, pessimistic))
    assert brackets(low, high, step, direction, 25)
    more, less = SampledNoise(0.5, beta, 1.05), SampledNoise(0.5, beta, 0.95)
    assert not brackets(low, pessimistic(more, direction, width, 1e-12), step, direction, 25)
    assert not brackets(optimistic(less, direction, width, 1e-12), high, step, direction, 25)
    low, high = (
        make(_Broken(0.5, beta, 1.0), direction, width, 1e-12) for make in (optimistic, pessimistic)
    )
    assert not brackets(low, high, step, direction, 25)
