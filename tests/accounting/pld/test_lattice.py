"""One step on a grid: the pessimistic lattice must dominate it, the optimistic one be dominated."""

from collections.abc import Callable
from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hush.accounting.numerics import Array
from hush.accounting.pld import privacy_loss as loss
from hush.accounting.pld.lattice import SNAP, Lattice, optimistic, pessimistic
from hush.accounting.pld.privacy_loss import CellMasses, Direction
from hush.accounting.steps import SampledGaussian

BOTH = list(Direction)


def exact(step: SampledGaussian, direction: Direction, epsilon: float) -> float:
    """delta of one step with 40 digits, from the definition: the mass where the loss exceeds."""
    with mp.workdps(40):
        q, s = mp.mpf(step.rate), mp.mpf(step.multiplier)
        e = mp.mpf(epsilon)
        bound = e if direction is Direction.REMOVE else -e
        inner = (mp.exp(bound) - (1 - q)) / q
        if inner <= 0:
            # the loss is above log(1 - q) at every outcome
            return float(1 - mp.exp(e)) if direction is Direction.REMOVE else 0.0
        x = s * s * mp.log(inner) + mp.mpf(1) / 2
        sign = -1 if direction is Direction.REMOVE else 1
        null, shifted = mp.ncdf(sign * x / s), mp.ncdf(sign * (x - 1) / s)
        mixed = (1 - q) * null + q * shifted
        if direction is Direction.REMOVE:
            return float(mixed - mp.exp(e) * null)
        return float(null - mp.exp(e) * mixed)


def curve(lattice: Lattice, epsilon: float) -> float:
    """delta of a lattice, from the definition."""
    gains = -np.expm1(np.minimum(epsilon - lattice.losses, 0.0))
    return float(lattice.masses @ gains) + lattice.infinite_mass


def brackets(low: Lattice, high: Lattice, step: SampledGaussian, direction: Direction) -> bool:
    """Whether the curves lie on either side of the true one, at many epsilons.

    Up to what `compose` pays for one step: a loss moved by 2 SNAP, masses moved by their rounding.
    """
    for epsilon in np.linspace(low.losses[0] - low.width, low.losses[-1], 61):
        upper = exact(step, direction, float(epsilon) - 2 * SNAP)
        lower = exact(step, direction, float(epsilon) + 2 * SNAP)
        if not curve(low, epsilon) <= upper * (1 + 1e-12) + 1e-15:
            return False
        if not lower * (1 - 1e-12) - 1e-15 <= curve(high, epsilon):
            return False
    return True


SETTINGS = [
    (0.001, 0.6, 1e-3),
    (0.01, 1.0, 1e-3),
    (0.2, 4.0, 5e-3),
    (0.001, 0.3, 3e-3),
    (1e-5, 0.6, 1e-3),
    (0.5, 0.5, 0.05),
    (1.0, 1.5, 0.02),
    (0.999, 2.0, 0.02),
    (1e-4, 20.0, 1e-6),
]


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize(("rate", "multiplier", "width"), SETTINGS)
def test_the_true_curve_lies_between(
    rate: float, multiplier: float, width: float, direction: Direction
) -> None:
    step = SampledGaussian(rate, multiplier)
    low, high = (make(step, direction, width, 1e-12) for make in (optimistic, pessimistic))
    assert (low.masses >= 0).all()
    assert (high.masses >= 0).all()
    assert brackets(low, high, step, direction)


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


def unfused(step: SampledGaussian, direction: Direction, width: float) -> Lattice:
    """The tempting lower bound: every bin's mass on its grid point, not fused."""
    model = optimistic(step, direction, width, 1e-12)
    masses = step.law.cell_masses(direction, model.losses[:-1] + width / 2).first
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
    masses = step.law.cell_masses(direction, cuts)
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

    exact_masses = loss.SampledLaw.cell_masses

    def rounded(sign: int) -> Callable[[loss.SampledLaw, Direction, Array], CellMasses]:
        def perturbed(law: loss.SampledLaw, direction: Direction, cuts: Array) -> CellMasses:
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
        monkeypatch.setattr(loss.SampledLaw, "cell_masses", rounded(sign))
        high, low = (
            make.__wrapped__(step, direction, width, 1e-12) for make in (pessimistic, optimistic)
        )
        for epsilon in high.losses:
            assert curve(high, epsilon) >= curve(true[pessimistic], epsilon) * (1 - 1e-9)
            assert curve(low, epsilon) <= curve(true[pessimistic], epsilon)
