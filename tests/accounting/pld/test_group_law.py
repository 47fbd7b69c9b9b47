"""Groups and replaced records: one step against quadrature, many against dp-accounting and sampling."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as peer
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import binom

from hush.accounting.numerics import Array
from hush.accounting.pld import accountant
from hush.accounting.pld.laws import GaussianLaw
from hush.accounting.pld.privacy_loss import Direction, GroupLaw, Step
from hush.accounting.steps import SampledGaussian, SampledNoise
from hush.core.guarantee import Bound

One = SampledGaussian | SampledNoise
BOTH = list(Direction)
STEPS: list[One] = [
    SampledGaussian(0.1, 1.0),
    SampledGaussian(0.01, 0.7),
    SampledNoise(0.1, 1.0, 1.5),
    SampledNoise(0.2, 3.0, 2.0),
]


def group_of(one: One, size: int, replaced: bool) -> GroupLaw:
    return GroupLaw(one.noise, one.rate, size, replaced)


def log_density(one: One, x: Array) -> Array:
    """The noise's log-density up to a constant; its integral over an even grid makes it one."""
    if isinstance(one, SampledGaussian):
        return -((x / one.multiplier) ** 2) / 2
    return -(np.abs(x / one.scale) ** one.beta)


def outcomes(one: One, size: int) -> Array:
    scale = one.multiplier if isinstance(one, SampledGaussian) else one.scale
    reach = 40 * scale if isinstance(one, SampledNoise) and one.beta == 1 else 12 * scale
    return np.linspace(-size - reach, size + reach, 200_001)


def laws(one: One, size: int, replaced: bool) -> tuple[Array, Array]:
    """Probabilities of narrow cells under the two laws, by definition."""
    x = outcomes(one, size)
    total = np.exp(log_density(one, x)).sum()
    shares = binom.pmf(np.arange(size + 1), size, one.rate)
    with_records = sum(w * np.exp(log_density(one, x - k)) for k, w in enumerate(shares)) / total
    if replaced:
        return with_records, with_records[::-1]
    return with_records, np.exp(log_density(one, x)) / total


def quadrature(one: One, size: int, replaced: bool, direction: Direction, epsilon: float) -> float:
    """delta of one step: the integral of (first law - e^epsilon second law)+."""
    first, second = laws(one, size, replaced)
    if direction is Direction.ADD:
        first, second = second, first
    return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())


def one_sided(counts: dict[Step, int], direction: Direction, epsilon: float) -> tuple[float, float]:
    """Bounds on delta in one direction."""
    (bounds,) = accountant._one_sided_profile(counts, direction, [epsilon], [0.0])
    return bounds


def contains(bound: Bound, exact: float) -> bool:
    return bound.lower <= exact * (1 + 1e-5) + 1e-14 and exact * (1 - 1e-5) - 1e-14 <= bound.upper


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("size", [2, 3, pytest.param(10, marks=pytest.mark.slow)])
@pytest.mark.parametrize("one", STEPS)
def test_one_step_against_quadrature(one: One, size: int, replaced: bool) -> None:
    step = group_of(one, size, replaced)
    for direction in BOTH:
        for epsilon in (0.1, 0.7, 3.0):
            exact = quadrature(one, size, replaced, direction, epsilon)
            if 1e-12 < exact < 0.4:
                lower, upper = accountant._epsilon({step: 1}, direction, exact, at_least=0.0)
                assert epsilon - 2e-3 <= lower <= epsilon + 1e-5, (epsilon, direction)
                assert epsilon - 1e-5 <= upper <= epsilon + 2e-3, (epsilon, direction)
        lower, upper = one_sided({step: 1}, direction, 3.0)
        assert contains(Bound(lower=lower, upper=upper), exact)
        assert upper <= 1.02 * exact + 1e-10


@pytest.mark.parametrize("rate", [0.5, 0.9, 0.99, 1.0])
@pytest.mark.parametrize("multiplier", [0.7, 5.0, 28.0])
def test_one_step_of_a_replaced_record_at_high_rates_is_tight(rate: float, multiplier: float) -> None:
    one = SampledGaussian(rate, multiplier)
    bound = accountant.epsilon({group_of(one, 1, True): 1}, 1e-5)
    exact = brentq(lambda x: quadrature(one, 1, True, Direction.REMOVE, x) - 1e-5, 0.0, 60.0)
    assert bound.lower - 2e-4 <= exact <= bound.upper + 2e-4
    assert bound.upper - bound.lower <= 2e-3 + 2e-3 * exact


BROKEN: dict[str, Callable[[SampledGaussian, int], Step]] = {
    "more often": lambda one, size: SampledGaussian(min(1.0, size * one.rate), one.multiplier),
    "together": lambda one, size: SampledGaussian(one.rate, one.multiplier / size),
    "fewer": lambda one, size: group_of(one, size - 1, False),
    "more noise": lambda one, size: GroupLaw(GaussianLaw(1.05 * one.multiplier), one.rate, size, False),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("size", [2, 3, 10])
def test_other_charges_are_seen(broken: str, size: int) -> None:
    one = SampledGaussian(0.1, 1.0)
    exact = max(quadrature(one, size, False, direction, 1.0) for direction in BOTH)
    assert not contains(accountant.delta({BROKEN[broken](one, size): 1}, 1.0), exact)


@pytest.mark.parametrize("charged", [SampledGaussian(0.1, 1.0), group_of(STEPS[0], 2, False)])
def test_replacement_charged_as_removal_is_seen(charged: Step) -> None:
    exact = quadrature(STEPS[0], 1, True, Direction.REMOVE, 0.3)
    assert not contains(accountant.delta({charged: 1}, 0.3), exact)


@pytest.mark.parametrize(
    ("size", "rate", "steps", "interval"),
    [
        (2, 0.05, 4, 4e-3),
        *(
            pytest.param(*each, 1e-3, marks=pytest.mark.slow)
            for each in ((2, 0.05, 40), (10, 0.002, 30))
        ),
    ],
)
def test_dp_accounting_from_both_sides(size: int, rate: float, steps: int, interval: float) -> None:
    bound = accountant.epsilon({group_of(SampledGaussian(rate, 1.1), size, False): steps}, 1e-6)
    shares = binom.pmf(np.arange(size + 1), size, rate)
    shifts = list(range(size + 1))
    above, below = (
        peer.from_mixture_gaussian_mechanism(
            1.1, shifts, list(shares), pessimistic_estimate=side, value_discretization_interval=interval
        )
        .self_compose(steps)
        .get_epsilon_for_delta(1e-6)
        for side in (True, False)
    )
    assert bound.lower <= above <= bound.upper + 2e-3
    assert below <= bound.upper
    assert bound.upper - bound.lower < 1e-3


def test_a_group_of_one_is_one_record() -> None:
    for one in STEPS:
        alone = accountant.epsilon({one: 100}, 1e-6)
        grouped = accountant.epsilon({group_of(one, 1, False): 100}, 1e-6)
        assert grouped.lower <= alone.upper
        assert alone.lower <= grouped.upper
        assert grouped.upper == pytest.approx(alone.upper, rel=2e-3)


def plane_delta(
    density: Callable[[Array, Array], Array],
    first: list[tuple[float, Array]],
    second: list[tuple[float, Array]],
    epsilon: float,
    reach: float,
) -> float:
    """delta between two mixtures of shifts of noise in the plane, by quadrature."""
    side = np.linspace(-reach, reach, 601)
    x, y = np.meshgrid(side, side)
    total = density(x, y).sum()
    p, q = (
        sum(w * density(x - shift[0], y - shift[1]) for w, shift in law) / total
        for law in (first, second)
    )
    return float(np.maximum(p - math.exp(epsilon) * q, 0.0).sum())


def drawn_sums(rate: float, vectors: Array) -> list[tuple[float, Array]]:
    """Chances and sums of all subsets of the vectors."""
    sums = [(1.0, np.zeros(2))]
    for vector in vectors:
        sums = [
            (chance * share, total + moved)
            for chance, total in sums
            for share, moved in ((1 - rate, 0 * vector), (rate, vector))
        ]
    return sums


KINDS: dict[str, tuple[Callable[[Array, Array], Array], int, One, float]] = {
    "normal": (lambda x, y: np.exp(-(x**2 + y**2) / 2), 2, SampledGaussian(0.3, 1.0), 9.0),
    "laplace": (lambda x, y: np.exp(-np.abs(x) - np.abs(y)), 1, SampledNoise(0.3, 1.0, 1.0), 22.0),
}


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
@given(
    polar=st.lists(st.tuples(st.floats(0, 2 * math.pi), st.floats(0, 1)), min_size=4, max_size=4),
    replaced=st.booleans(),
    epsilon=st.floats(0, 1.5),
)
@settings(max_examples=25, deadline=None)
def test_no_directions_and_no_lengths_cost_more(
    kind: str, polar: list[tuple[float, float]], replaced: bool, epsilon: float
) -> None:
    density, p, one, reach = KINDS[kind]
    vectors = np.array([[math.cos(angle), math.sin(angle)] for angle, _ in polar])
    vectors *= np.array([[r] for _, r in polar]) / np.linalg.norm(vectors, p, axis=1, keepdims=True)
    present = drawn_sums(one.rate, vectors[:2])
    absent = drawn_sums(one.rate, vectors[2:]) if replaced else [(1.0, np.zeros(2))]
    charged = accountant.delta({group_of(one, 2, replaced): 1}, epsilon).upper
    for first, second in ((present, absent), (absent, present)):
        assert plane_delta(density, first, second, epsilon, reach) <= charged * (1 + 1e-3) + 1e-4


@pytest.mark.few(3)
@pytest.mark.parametrize("delta", [1e-30, 1e-5])
@pytest.mark.parametrize(
    ("one", "size", "steps"),
    [
        (SampledGaussian(1e-8, 1e-3), 7, 1),
        (SampledGaussian(0.5, 1e-300), 3, 10),
        (SampledGaussian(0.01, 1e6), 20, 1_000_000),
        (SampledGaussian(1 - 2**-53, 5.0), 4, 10),
        pytest.param(SampledNoise(0.3, 12.0, 0.01), 2, 3, marks=pytest.mark.slow),
        (SampledNoise(1e-6, 1.0, 1e-4), 5, 3),
    ],
)
def test_extremes_are_finite_and_silent(one: One, size: int, steps: int, delta: float) -> None:
    for replaced in (False, True):
        bound = accountant.epsilon({group_of(one, size, replaced): steps}, delta)
        assert not math.isnan(bound.upper)
        assert accountant.epsilon({one: steps}, delta).lower <= bound.upper * (1 + 1e-9)


@pytest.mark.slow
@given(
    rate=st.floats(-5, -0.3).map(lambda power: 10**power),
    scale=st.floats(-0.5, 1.5).map(lambda power: 10**power),
    beta=st.sampled_from([1.0, 1.5, 2.0, 4.0]),
    size=st.integers(1, 6),
    steps=st.integers(1, 300),
)
@settings(max_examples=4, deadline=None)
def test_monotone(rate: float, scale: float, beta: float, size: int, steps: int) -> None:
    one = SampledNoise(rate, beta, scale)

    def charge(one: SampledNoise, size: int, replaced: bool, steps: int = steps) -> Bound:
        return accountant.epsilon({group_of(one, size, replaced): steps}, 1e-5)

    bound = charge(one, size, False)
    dearer = [
        charge(one, size + 1, False),
        charge(one, size, True),
        charge(dataclasses.replace(one, rate=1.1 * rate), size, False),
        charge(dataclasses.replace(one, scale=scale / 1.1), size, False),
        charge(one, size, False, 2 * steps),
    ]
    assert all(bound.lower <= other.upper for other in dearer)
    assert charge(one, size, True).lower <= charge(one, size + 1, True).upper


@pytest.mark.parametrize("one", [SampledGaussian(0.95, 7.57), SampledGaussian(0.9, 87.1)], ids=str)
def test_one_replaced_record_at_a_high_rate_is_tight(one: SampledGaussian) -> None:
    """The window missed the largest losses, whose mass was then bounded by one."""
    step = group_of(one, 1, True)
    bound = accountant.epsilon({step: 1}, 1e-5)
    assert bound.upper <= bound.lower * (1 + 1e-3)
    for epsilon, sign in ((bound.lower, 1), (bound.upper, -1)):
        exact = quadrature(one, 1, True, Direction.REMOVE, epsilon)
        assert sign * (exact - 1e-5) >= -1e-9


@pytest.mark.parametrize(
    ("rate", "scale", "delta"), [(0.5, 4.0, 0.1), (0.9, 2.0, 1e-2), (0.1, 2.0, 1e-5), (0.01, 4.0, 1e-7)]
)
def test_one_replaced_record_under_laplace_noise_is_tight(
    rate: float, scale: float, delta: float
) -> None:
    """The atom at the largest loss was rounded to an infinite loss, or to a smaller one."""
    one = SampledNoise(rate, 1.0, scale)
    bound = accountant.epsilon({group_of(one, 1, True): 1}, delta)
    exact = brentq(lambda x: quadrature(one, 1, True, Direction.REMOVE, x) - delta, 0.0, 3.0)
    assert bound.lower - 1e-5 <= exact <= bound.upper + 1e-5
    assert bound.upper - bound.lower <= 1e-3 * exact
