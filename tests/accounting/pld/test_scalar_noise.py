"""Sampled scalar noise: one step against 30 digits, many against dp-accounting and the Gaussian."""

import math
from dataclasses import dataclass

import mpmath as mp
import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as peer
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting.pld import accountant
from hush.accounting.pld.lattice import Lattice, aligned_width, optimistic, pessimistic
from hush.accounting.pld.laws import GeneralizedGaussianLaw
from hush.accounting.pld.privacy_loss import Array, Direction, Step, loss_range
from hush.accounting.pld.snapping import SNAP
from hush.accounting.steps import SampledGaussian, SampledNoise
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
        most = exact(step, direction, float(epsilon) - shift)
        least = exact(step, direction, float(epsilon) + shift)
        if not curve(low, epsilon) <= most * (1 + 1e-12) + 1e-15:
            return False
        if not least * (1 - 1e-12) - 1e-15 <= curve(high, epsilon):
            return False
    return True


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("beta", BETAS)
def test_the_true_curve_lies_between(beta: float, rate: float, direction: Direction) -> None:
    step = SampledNoise(rate, beta, 1.3)
    low, high = (make(step, direction, 0.02, 1e-12) for make in (optimistic, pessimistic))
    assert (low.masses >= 0).all()
    assert (high.masses >= 0).all()
    assert brackets(low, high, step, direction)


@pytest.mark.parametrize("direction", BOTH)
@pytest.mark.parametrize("rate", RATES)
def test_the_true_curve_lies_between_where_the_grid_holds_both_ends(
    rate: float, direction: Direction
) -> None:
    step = SampledNoise(rate, 1.0, 1.3)
    width = aligned_width(step, direction, 0.05 * rate)
    low, high = (make(step, direction, width, 1e-12) for make in (optimistic, pessimistic))
    assert brackets(low, high, step, direction)
    # The end where the record's own noise puts an atom is exact, the other off by part of a width.
    held = low.losses[low.masses > 1e-9][[0, -1]]
    off = np.abs(held - loss_range(step, direction))
    assert off[1 if direction is Direction.REMOVE else 0] < 1e-13
    assert off.max() < width / 2


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


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("beta", BETAS)
def test_delta_of_one_step(beta: float, rate: float) -> None:
    step = SampledNoise(rate, beta, 1.3)
    for epsilon in (1e-3, 0.05, 0.3, 0.7, 2.0):
        truth = max(exact(step, direction, epsilon) for direction in BOTH)
        found = accountant.delta({step: 1}, epsilon)
        assert found.lower <= truth * (1 + 1e-9)
        assert truth * (1 - 1e-9) <= found.upper
        assert found.upper <= 1.02 * truth + 1e-12


@dataclass(frozen=True)
class _WrongTail(GeneralizedGaussianLaw):
    """A law whose masses are those of another power."""

    def survival(self, noise: Array) -> Array:
        return GeneralizedGaussianLaw(1.05 * self.beta, self.scale).survival(noise)


@dataclass(frozen=True)
class _Broken(SampledNoise):
    """A step that forgets which power its noise has."""

    @property
    def law(self) -> GeneralizedGaussianLaw:
        return _WrongTail(self.beta, self.scale)


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


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
@pytest.mark.parametrize(
    ("rate", "scale", "steps"), [(1.0, 1.0, 1), (1.0, 10.0, 30), (0.01, 1.4, 1000), (0.5, 5.0, 40)]
)
def test_power_two_is_the_gaussian(rate: float, scale: float, steps: int, delta: float) -> None:
    found = accountant.epsilon({SampledNoise(rate, 2.0, scale): steps}, delta)
    known = accountant.epsilon({SampledGaussian(rate, scale / math.sqrt(2)): steps}, delta)
    assert found.lower <= known.upper
    assert known.lower <= found.upper
    for end, other in ((found.lower, known.lower), (found.upper, known.upper)):
        assert end == pytest.approx(other, abs=1e-3)


def within_peer(step: SampledNoise, claimed: SampledNoise, steps: int) -> bool:
    """Whether bounds for `claimed` fit dp-accounting's two sides for Laplace noise, to 1e-3."""
    pessimistic, optimistic = (
        peer.from_laplace_mechanism(
            step.scale,
            sampling_prob=step.rate,
            value_discretization_interval=1e-4,
            pessimistic_estimate=side,
        )
        .self_compose(steps)
        .get_epsilon_for_delta(1e-5)
        for side in (True, False)
    )
    found = accountant.epsilon({claimed: steps}, 1e-5)
    return (
        found.lower <= pessimistic <= found.upper + 1e-3 * max(1.0, pessimistic)
        and found.upper >= optimistic
        and found.upper - found.lower < 1e-3
    )


@pytest.mark.parametrize(
    ("rate", "scale", "steps"),
    [(1.0, 2.0, 1), (1.0, 8.0, 30), (1.0, 60.0, 1000), (0.1, 1.0, 30), (0.02, 1.0, 1000), (0.3, 0.5, 1)],
)
def test_laplace_against_dp_accounting(rate: float, scale: float, steps: int) -> None:
    step = SampledNoise(rate, 1.0, scale)
    assert within_peer(step, step, steps)
    assert not within_peer(step, SampledNoise(rate, 1.0, 1.05 * scale), steps)
    assert not within_peer(step, SampledNoise(rate, 1.05, scale), steps)


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("steps", [1, 30, 1000])
def test_laplace_without_sampling_is_pure(scale: float, steps: int) -> None:
    counts = {SampledNoise(1.0, 1.0, scale): steps}
    for delta in (1e-300, 1e-30, 1e-5):
        assert accountant.epsilon(counts, delta).upper <= steps / scale * (1 + 1e-11)
    assert accountant.delta(counts, steps / scale * (1 + 1e-11)).upper == 0


def test_kinds_of_steps_mix() -> None:
    laplace, gaussian = SampledNoise(0.05, 1.0, 2.0), SampledGaussian(0.05, 1.5)
    counts: dict[Step, int] = {laplace: 200, gaussian: 200, SampledGaussian(1.0, 20.0): 3}
    found = accountant.epsilon(counts, 1e-5)
    assert found.upper - found.lower < 1e-3
    assert found.lower > accountant.epsilon({gaussian: 200}, 1e-5).upper
    pieces = (
        peer.from_laplace_mechanism(2.0, sampling_prob=0.05, value_discretization_interval=1e-3),
        peer.from_gaussian_mechanism(1.5, sampling_prob=0.05, value_discretization_interval=1e-3),
        peer.from_gaussian_mechanism(20.0, value_discretization_interval=1e-3),
    )
    known = pieces[0].self_compose(200).compose(pieces[1].self_compose(200))
    known = known.compose(pieces[2].self_compose(3))
    assert known.get_epsilon_for_delta(1e-5) == pytest.approx(found.upper, abs=2e-3)
    assert (
        accountant.delta(counts, found.upper).lower
        <= 1e-5
        <= accountant.delta(counts, found.lower).upper
    )


def test_a_split_change_is_worse_between_laplace_and_normal() -> None:
    """Why vectors are not charged as numbers: one change of l_beta norm 1, or two halves of it."""
    beta, scale, epsilon = 1.25, 1.0, 1.4
    whole = accountant.delta({SampledNoise(1.0, beta, scale): 1}, epsilon)
    split = accountant.delta({SampledNoise(1.0, beta, scale * 2 ** (1 / beta)): 2}, epsilon)
    assert split.lower > 1.05 * whole.upper


@given(
    rate=st.sampled_from(RATES),
    scale=st.floats(0.3, 20.0),
    share=st.floats(0.05, 0.95),
    relative=st.floats(0.0, 1.2),
)
@settings(max_examples=20, deadline=None)
def test_a_split_change_is_no_worse_under_laplace(
    rate: float, scale: float, share: float, relative: float
) -> None:
    # without sampling, where the two coordinates are independent steps
    whole = accountant.delta({SampledNoise(1.0, 1.0, scale): 1}, relative / scale)
    parts = [SampledNoise(1.0, 1.0, scale / part) for part in (share, 1 - share)]
    split = accountant.delta(
        {parts[0]: 1, parts[1]: 1} if parts[0] != parts[1] else {parts[0]: 2}, relative / scale
    )
    assert split.lower <= whole.upper


@given(
    rate=st.floats(-3, -0.05).map(lambda power: 10**power),
    beta=st.one_of(st.just(1.0), st.floats(1.05, 4.0)),
    scale=st.floats(1.0, 8.0),
    steps=st.integers(1, 1000),
    log_delta=st.floats(-10, -1),
)
@settings(max_examples=12, deadline=None)
def test_monotone(rate: float, beta: float, scale: float, steps: int, log_delta: float) -> None:
    delta = 10**log_delta

    def charge(rate: float, scale: float, steps: int, delta: float) -> tuple[float, float]:
        found = accountant.epsilon({SampledNoise(rate, beta, scale): steps}, delta)
        return found.lower, found.upper

    lower, upper = charge(rate, scale, steps, delta)
    if beta > 1 or steps > 3 or rate > 0.05:  # else: `test_few_steps_of_rare_laplace_noise`
        assert upper - lower <= 5e-3 * max(1.0, lower / 50)
    assert lower <= charge(rate, scale, 2 * steps, delta)[1]
    assert lower <= charge(rate, scale / 1.1, steps, delta)[1]
    assert lower <= charge(1.0, scale, steps, delta)[1]
    assert lower <= charge(rate, scale, steps, delta / 2)[1]


@pytest.mark.parametrize("scale", [1.0, 1.01, 2.0])
def test_few_steps_of_rare_laplace_noise(scale: float) -> None:
    """The upper end is nearly the truth; the lower one is sound and up to 2.7 times too small here."""
    rate, delta = 0.01, 1e-6
    found = accountant.epsilon({SampledNoise(rate, 1.0, scale): 1}, delta)
    largest = math.log1p(rate * math.expm1(1 / scale))
    # outcomes of 1 and more have the largest loss
    mass = (1 - rate) * math.exp(-1 / scale) / 2 + rate / 2
    truth = largest + math.log1p(-delta / mass)
    assert found.lower <= truth <= found.upper
    assert found.upper - truth <= 1e-5
    assert found.lower >= truth / 2.8


@pytest.mark.parametrize("delta", [1e-30, 1e-5, 0.5])
@pytest.mark.parametrize("rate", [1.0, 0.01])
@pytest.mark.parametrize("beta", [1.0, 1 + 1e-9, 1.25, 4.0, 12.0])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_extremes(scale: float, beta: float, rate: float, delta: float) -> None:
    found = accountant.epsilon({SampledNoise(rate, beta, scale): 10}, delta)
    assert 0 <= found.lower <= found.upper < math.inf


@pytest.mark.parametrize("scale", [1e-300, 1e20, 1e30, 1e300])
@pytest.mark.parametrize("beta", [1.0, 1.5, 4.0])
def test_beyond_extremes(scale: float, beta: float) -> None:
    for rate, steps in ((1.0, 10_000_000), (0.5, 1), (1e-8, 10_000_000)):
        counts = {SampledNoise(rate, beta, scale): steps}
        found = accountant.epsilon(counts, 1e-30)
        assert 0 <= found.lower <= found.upper
        assert accountant.delta(counts, 1.0).lower <= 1


@pytest.mark.parametrize(
    "values", [(0.1, 0.9, 1.0), (0.1, 13.0, 1.0), (0.1, math.nan, 1.0), (0.1, 1.0, 0.0), (0.0, 1.0, 1.0)]
)
def test_what_is_not_proved_is_refused(values: tuple[float, float, float]) -> None:
    with pytest.raises(InvalidValue):
        SampledNoise(*values)
