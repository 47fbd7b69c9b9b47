"""Compositions of sampled scalar noise against dp-accounting, the Gaussian and pure epsilons."""

import math

import pytest
from dp_accounting.pld import privacy_loss_distribution as peer
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting.pld import accountant
from hush.accounting.pld.privacy_loss import Step
from hush.accounting.steps import SampledGaussian, SampledNoise


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 0.1])
@pytest.mark.parametrize(
    ("rate", "scale", "steps"), [(1.0, 1.0, 1), (1.0, 10.0, 30), (0.01, 1.4, 1000), (0.5, 5.0, 40)]
)
def test_power_two_is_the_gaussian(rate: float, scale: float, steps: int, delta: float) -> None:
    bound = accountant.epsilon({SampledNoise(rate, 2.0, scale): steps}, delta)
    gaussian = accountant.epsilon({SampledGaussian(rate, scale / math.sqrt(2)): steps}, delta)
    assert bound.lower <= gaussian.upper
    assert gaussian.lower <= bound.upper
    for end, expected in ((bound.lower, gaussian.lower), (bound.upper, gaussian.upper)):
        assert end == pytest.approx(expected, abs=1e-3)


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
    bound = accountant.epsilon({claimed: steps}, 1e-5)
    return (
        bound.lower <= pessimistic <= bound.upper + 1e-3 * max(1.0, pessimistic)
        and bound.upper >= optimistic
        and bound.upper - bound.lower < 1e-3
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


@pytest.mark.few(4)
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
    bound = accountant.epsilon(counts, 1e-5)
    assert bound.upper - bound.lower < 1e-3
    assert bound.lower > accountant.epsilon({gaussian: 200}, 1e-5).upper
    pieces = (
        peer.from_laplace_mechanism(2.0, sampling_prob=0.05, value_discretization_interval=1e-3),
        peer.from_gaussian_mechanism(1.5, sampling_prob=0.05, value_discretization_interval=1e-3),
        peer.from_gaussian_mechanism(20.0, value_discretization_interval=1e-3),
    )
    composed = pieces[0].self_compose(200).compose(pieces[1].self_compose(200))
    composed = composed.compose(pieces[2].self_compose(3))
    assert composed.get_epsilon_for_delta(1e-5) == pytest.approx(bound.upper, abs=2e-3)
    assert (
        accountant.delta(counts, bound.upper).lower
        <= 1e-5
        <= accountant.delta(counts, bound.lower).upper
    )


def test_a_split_change_is_worse_between_laplace_and_normal() -> None:
    """Why vectors are not charged as numbers: one change of l_beta norm 1, or two halves of it."""
    beta, scale, epsilon = 1.25, 1.0, 1.4
    whole = accountant.delta({SampledNoise(1.0, beta, scale): 1}, epsilon)
    split = accountant.delta({SampledNoise(1.0, beta, scale * 2 ** (1 / beta)): 2}, epsilon)
    assert split.lower > 1.05 * whole.upper


@given(scale=st.floats(0.3, 20.0), share=st.floats(0.05, 0.95), relative=st.floats(0.0, 1.2))
@settings(max_examples=20, deadline=None)
def test_a_split_change_is_no_worse_under_laplace(scale: float, share: float, relative: float) -> None:
    # without sampling, where the two coordinates are independent steps
    whole = accountant.delta({SampledNoise(1.0, 1.0, scale): 1}, relative / scale)
    parts = [SampledNoise(1.0, 1.0, scale / part) for part in (share, 1 - share)]
    split = accountant.delta(
        {parts[0]: 1, parts[1]: 1} if parts[0] != parts[1] else {parts[0]: 2}, relative / scale
    )
    assert split.lower <= whole.upper


@pytest.mark.few(8)
@pytest.mark.parametrize("delta", [1e-30, 0.5, pytest.param(1e-5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("rate", [1.0, 0.01])
@pytest.mark.parametrize("beta", [1.0, 1 + 1e-9, 4.0, pytest.param(12.0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_extremes(scale: float, beta: float, rate: float, delta: float) -> None:
    bound = accountant.epsilon({SampledNoise(rate, beta, scale): 10}, delta)
    assert 0 <= bound.lower <= bound.upper < math.inf
