"""One step of sampled scalar noise against 30 digits."""

import math
from dataclasses import dataclass

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting.numerics import Array
from hush.accounting.pld import accountant
from hush.accounting.pld.lattice import SNAP, Lattice, optimistic, pessimistic
from hush.accounting.pld.laws import GeneralizedGaussianLaw
from hush.accounting.pld.privacy_loss import Direction
from hush.accounting.steps import SampledNoise
from hush.core.errors import InvalidValue

BOTH = list(Direction)
BETAS = [1.0, 1.25, 2.0, 2.33, 4.0]
RATES = [1.0, 0.5, 0.01]


def exact(step: SampledNoise, direction: Direction, epsilon: float) -> float:
    """delta of one step with 30 digits: the loss is monotone, so the best test is a half-line."""
    with mp.workdps(30):
        q, beta, scale, e = (mp.mpf(v) for v in (step.rate, step.beta, step.scale, epsilon))
        remove = direction is Direction.REMOVE
        inner = (mp.exp(e if remove else -e) - (1 - q)) / q
        low, high = -scale * 800 ** (1 / beta), 1 + scale * 800 ** (1 / beta)
        aim = mp.log(inner) if inner > 0 else -mp.inf

        def ratio(x: mp.mpf) -> mp.mpf:
            return (abs(x) / scale) ** beta - (abs(x - 1) / scale) ** beta

        def beyond(x: mp.mpf) -> mp.mpf:
            half = mp.gammainc(1 / beta, (abs(x) / scale) ** beta, mp.inf, regularized=True) / 2
            return half if x > 0 else 1 - half

        for _ in range(110):
            middle = (low + high) / 2
            low, high = (middle, high) if ratio(middle) <= aim else (low, middle)
        sign = 1 if remove else -1
        null, moved = beyond(sign * low), beyond(sign * (low - 1))
        mixed = (1 - q) * null + q * moved
        first, second = (mixed, null) if remove else (null, mixed)
        return float(max(first - mp.exp(e) * second, 0, 1 - mp.exp(e)))


def curve(lattice: Lattice, epsilon: float) -> float:
    """delta of a lattice, from the definition."""
    gains = -np.expm1(np.minimum(epsilon - lattice.losses, 0.0))
    return float(lattice.masses @ gains) + lattice.infinite_mass


def brackets(
    low: Lattice, high: Lattice, step: SampledNoise, direction: Direction, points: int = 25
) -> bool:
    """Whether the curves lie on either side of the true one, up to what `compose` pays for."""
    shift = 2 * SNAP + 1e-14 * float(np.abs(high.losses[[0, -1]]).max())
    for epsilon in np.linspace(low.losses[0] - low.width, low.losses[-1], points):
        upper = exact(step, direction, float(epsilon) - shift)
        lower = exact(step, direction, float(epsilon) + shift)
        if not curve(low, epsilon) <= upper * (1 + 1e-12) + 1e-15:
            return False
        if not lower * (1 - 1e-12) - 1e-15 <= curve(high, epsilon):
            return False
    return True


@pytest.mark.few(10)
@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("beta", BETAS)
def test_the_true_curve_lies_between(beta: float, rate: float, direction: Direction) -> None:
    step = SampledNoise(rate, beta, 1.3)
    low, high = (make(step, direction, 0.02, 1e-12) for make in (optimistic, pessimistic))
    assert (low.masses >= 0).all()
    assert (high.masses >= 0).all()
    assert brackets(low, high, step, direction)


@given(
    rate=st.floats(-4, 0).map(lambda power: 10**power),
    beta=st.one_of(st.just(1.0), st.floats(1, 6)),
    scale=st.floats(-0.5, 1.5).map(lambda power: 10**power),
    relative=st.floats(-2, 0.5).map(lambda power: 10**power),
    direction=st.sampled_from(BOTH),
)
@settings(max_examples=40, deadline=None)
def test_the_true_curve_lies_between_on_any_grid(
    rate: float, beta: float, scale: float, relative: float, direction: Direction
) -> None:
    step = SampledNoise(rate, beta, scale)
    width = max(relative * min(1.0, rate / scale), 3e-4)
    low, high = (make(step, direction, width, 1e-12) for make in (optimistic, pessimistic))
    assert brackets(low, high, step, direction, points=9)


@pytest.mark.few(5)
@pytest.mark.parametrize("rate", RATES)
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
    assert brackets(low, high, step, direction)
    more, less = SampledNoise(0.5, beta, 1.05), SampledNoise(0.5, beta, 0.95)
    assert not brackets(low, pessimistic(more, direction, width, 1e-12), step, direction)
    assert not brackets(optimistic(less, direction, width, 1e-12), high, step, direction)
    low, high = (
        make(_Broken(0.5, beta, 1.0), direction, width, 1e-12) for make in (optimistic, pessimistic)
    )
    assert not brackets(low, high, step, direction)


@pytest.mark.parametrize(
    "values", [(0.1, 0.9, 1.0), (0.1, 13.0, 1.0), (0.1, math.nan, 1.0), (0.1, 1.0, 0.0), (0.0, 1.0, 1.0)]
)
def test_what_is_not_proved_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidValue):
        SampledNoise(*values)
