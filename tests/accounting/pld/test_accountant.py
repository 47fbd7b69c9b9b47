"""Both ends of epsilon, against dp-accounting, exact convolution and what must be monotone."""

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as peer
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting.pld import accountant
from hush.accounting.pld.compose import Cumulants, choose_window, compose
from hush.accounting.pld.lattice import optimistic, pessimistic
from hush.accounting.pld.privacy_loss import Direction, Step
from hush.accounting.rdp import gaussian
from hush.accounting.steps import SampledGaussian, SampledNoise
from hush.core.guarantee import Bound
from tests.accounting.pld.oracle import exact

# (rate, multiplier, steps), and dp-accounting's upper bound at delta 1e-5 and interval 1e-4
REFERENCES = [
    ((0.001, 0.6, 100_000), 6.11313),
    ((0.01, 1.0, 10_000), 6.18775),
    ((0.2, 4.0, 2000), 11.75542),
    ((1.0, 10.0, 500), 11.48002),
]


def charge(rate: float, multiplier: float, steps: int, delta: float = 1e-5) -> Bound:
    return accountant.epsilon({SampledGaussian(rate, multiplier): steps}, delta)


def agrees(bound: Bound, reference: float) -> bool:
    """Whether both ends are right to 1e-3, and on their own sides but for the reference's error."""
    return (
        reference - 1e-3 <= bound.lower <= reference + 2e-4
        and reference - 2e-4 <= bound.upper <= reference + 1e-3
    )


@pytest.mark.parametrize(("setting", "reference"), REFERENCES)
def test_references_and_noise_five_percent_off(
    setting: tuple[float, float, int], reference: float
) -> None:
    rate, multiplier, steps = setting
    assert agrees(charge(*setting), reference)
    assert not agrees(charge(rate, 1.05 * multiplier, steps), reference)


def test_an_accountant_that_forgets_to_remove_is_seen() -> None:
    pieces: dict[Step, int] = {SampledGaussian(0.3, 0.8): 20}
    composed = accountant.epsilon(pieces, 1e-5)
    lower, upper = accountant._epsilon(pieces, Direction.ADD, 1e-5, at_least=0.0)
    assert not agrees(Bound(lower=lower, upper=upper), (composed.lower + composed.upper) / 2)


@pytest.mark.parametrize(
    ("rate", "multiplier", "steps", "delta"),
    [(0.05, 0.9, 100, 1e-6), (0.3, 2.0, 50, 1e-8), (0.9, 3.0, 10, 1e-3), (1e-3, 0.7, 2000, 1e-5)],
)
def test_dp_accounting_from_both_sides(rate: float, multiplier: float, steps: int, delta: float) -> None:
    pessimistic, optimistic = (
        peer.from_gaussian_mechanism(
            multiplier, sampling_prob=rate, value_discretization_interval=1e-3, pessimistic_estimate=side
        )
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
        for side in (True, False)
    )
    bound = charge(rate, multiplier, steps, delta)
    assert bound.lower <= pessimistic
    assert bound.upper >= optimistic
    assert bound.upper - bound.lower < 1e-3


@pytest.mark.parametrize("direction", list(Direction))
def test_the_composed_curve_is_the_exact_convolution(direction: Direction) -> None:
    step, equivalent, width, tail = SampledGaussian(0.2, 1.0), SampledGaussian(1.0, 3.0), 0.02, 1e-12
    window = choose_window(
        Cumulants({step: 3, equivalent: 1}, direction, tail), log_delta=math.log(1e-4), epsilon=0.0
    )
    for make in (pessimistic, optimistic):
        first, second = make(step, direction, width, tail), make(equivalent, direction, width, tail)
        masses = np.convolve(np.convolve(first.masses, first.masses), first.masses)
        masses = np.convolve(masses, second.masses)
        start = 3 * first.losses[0] + second.losses[0]
        losses = start + np.arange(len(masses)) * width
        curve = compose([(first, 3), (second, 1)], window)
        for k in range(len(curve.tilted) // 4, 3 * len(curve.tilted) // 4, 25):
            gains = -np.expm1(np.minimum(curve.epsilon(k) - losses, 0.0))
            finite = float(masses @ gains)
            assert curve.bound(k, upper=False) <= finite * (1 + 1e-12)
            assert finite + curve.infinite_mass <= curve.bound(k, upper=True) * (1 + 1e-12)
            if finite > 1e-8:
                assert curve.bound(k, upper=True) == pytest.approx(finite, rel=1e-3)
                assert curve.bound(k, upper=False) == pytest.approx(finite, rel=1e-3)


@pytest.mark.few(5)
@pytest.mark.parametrize(
    "delta",
    [1e-300, 0.5, *(pytest.param(delta, marks=pytest.mark.slow) for delta in (1e-30, 1 - 1e-12))],
)
@pytest.mark.parametrize(
    ("rate", "multiplier", "steps"),
    [
        (1e-8, 1e-3, 1),
        (0.5, 1e-3, 100),
        (0.5, 1e-300, 10),
        (0.01, 1e6, 10_000_000),
        (0.01, 1e300, 10),
        (1e-8, 1.0, 10_000_000),
        pytest.param(0.5, 0.05, 10_000_000, marks=pytest.mark.slow),
        (1.0, 1e-300, 1),
    ],
)
def test_extremes(rate: float, multiplier: float, steps: int, delta: float) -> None:
    bound = charge(rate, multiplier, steps, delta)
    renyi = gaussian.epsilon({SampledGaussian(rate, multiplier): steps}, delta)
    assert bound.lower <= renyi * (1 + 1e-9), "another accountant's upper bound"
    assert bound.upper <= renyi * (1 + 1e-9) + 1e-3, "the loss distribution is never much looser"
    bound = accountant.delta({SampledGaussian(rate, multiplier): steps}, 1.0)
    assert bound.lower <= bound.upper <= 1


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("rate", "multiplier", "delta"),
    [
        (1.8660421507802497e-10, 0.31284314283387793, 1.1641301956678496e-11),
        (2.418135781327316e-10, 0.40743943247339337, 1.8500361221041606e-11),
        (8.987771854227495e-10, 0.37679128886442737, 1.2217806224524952e-12),
        (2.953118876512507e-09, 0.4846181035576365, 5.7037e-22),
        (0.1, 0.05, 0.09),
        (0.01, 0.5, 1e-8),
        (0.3, 0.2, 0.2999),
    ],
)
def test_one_step_lies_within_its_bounds(rate: float, multiplier: float, delta: float) -> None:
    """Rare draws, little noise and odd deltas, where the window is easily put in the wrong place."""
    bound, step = charge(rate, multiplier, 1, delta), SampledGaussian(rate, multiplier)
    lower, upper = (
        max(exact(step, side, end) for side in Direction) for end in (bound.lower, bound.upper)
    )
    assert bound.lower == 0 or lower >= delta * (1 - 1e-9)
    assert upper <= delta * (1 + 1e-9)


@pytest.mark.parametrize(
    "counts",
    [
        {SampledGaussian(0.01, 1.0): 1000},
        {SampledGaussian(0.3, 0.5): 2, SampledGaussian(1.0, 3.0): 4},
        {SampledNoise(0.1, 1.0, 1.0): 30},
    ],
)
def test_a_profile_is_what_its_epsilons_cost_one_by_one(counts: dict[Any, int]) -> None:
    epsilons = np.linspace(0.0, accountant.epsilon(counts, 1e-9).upper, 20).tolist()
    for at, shared in zip(epsilons, accountant.profile(counts, epsilons), strict=True):
        alone = accountant.delta(counts, at)
        # both hold the true delta, and the shared composition is hardly wider
        assert shared.lower <= alone.upper
        assert alone.lower <= shared.upper
        assert 0.98 * alone.lower <= shared.lower
        assert shared.upper <= 1.02 * alone.upper


@given(
    rate=st.floats(-4, -0.05).map(lambda power: 10**power),
    multiplier=st.floats(0.5, 8.0),
    steps=st.integers(1, 3000),
    log_delta=st.floats(-12, -1),
)
@settings(max_examples=15, deadline=None)
def test_monotone(rate: float, multiplier: float, steps: int, log_delta: float) -> None:
    delta = 10**log_delta
    bound = charge(rate, multiplier, steps, delta)
    if rate > 1e-3 or steps > 100:  # else: `test_few_steps_of_rare_records`
        assert bound.upper - bound.lower <= 5e-3 * max(1.0, bound.lower / 50)
    dearer = [
        charge(rate, multiplier, 2 * steps, delta),
        charge(rate, multiplier / 1.1, steps, delta),
        charge(min(1.0, 1.1 * rate), multiplier, steps, delta),
        charge(1.0, multiplier, steps, delta),
        charge(rate, multiplier, steps, delta / 2),
    ]
    for costlier in dearer:
        assert bound.lower <= costlier.upper
