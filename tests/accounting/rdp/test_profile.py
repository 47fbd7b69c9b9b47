"""The profile of one coordinate, and the certificate of its quadrature, against integrals."""

import math

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting.numerics import Array
from hush.accounting.rdp.profile import CoordinateRDP
from hush.accounting.rdp.quadrature import Integrand, log_moment_minus_one

BETAS = st.one_of(st.sampled_from([1.0, 2.0, 2.33, 3.0, 4.0]), st.floats(1, 5))
ORDERS = st.floats(-1.5, 1.5).map(lambda power: 1 + 10**power)
SHIFTS = st.floats(-4, 0.7).map(lambda power: 10**power)
SOME_RATES = st.floats(-3, -0.01).map(lambda power: 10**power)
RATES = st.one_of(st.just(1.0), SOME_RATES)


def exact(beta: float, rate: float, order: float, shift: float, forward: bool = True) -> mp.mpf:
    """log E (ratio)^order with 30 digits, from the definition, by Gauss-Legendre on short pieces.

    Forward is the mixture from the law at 0, backward the law at 0 from the mixture.
    """
    with mp.workdps(30):
        b, q, a, s = (mp.mpf(value) for value in (beta, rate, order, shift))

        def integrand(x: mp.mpf) -> mp.mpf:
            without = -(abs(x) ** b)
            ratio = 1 - q + q * mp.exp(-(abs(x - s) ** b) - without)
            return mp.exp(without) * ratio ** (a if forward else 1 - a)

        far = mp.mpf(75) ** (1 / b)
        points = {-far - s, mp.mpf(0), s / 2, s, s + far}
        if beta > 1:  # the far peak of (law at s)^a / (law at 0)^(a-1)
            peak = s / (1 - ((a - 1) / a) ** (1 / (b - 1)))
            width = 1 / mp.sqrt(b * (b - 1) * max(peak, 1) ** (b - 2))
            points |= {peak + k * width for k in range(-16, 19, 2)}
        points |= {mp.mpf(k) / 2 for k in range(-10, 11) if abs(k) / 2 < far}
        # tanh-sinh where the integrand has a kink at an end
        return mp.log(mp.quad(integrand, sorted(points)) / (2 * mp.gamma(1 + 1 / b)))


def dense(beta: float, rate: float, order: float, shift: float) -> float:
    """log(E (mixture / law)^order - 1) by a fine trapezoid over the whole line, to about 1e-6."""
    far = max(75 ** (1 / beta), 1.0)
    top = shift + far
    if beta > 1:
        peak = shift / (1 - ((order - 1) / order) ** (1 / (beta - 1)))
        top = max(top, peak + far * max(1.0, peak ** (1 - beta / 2)))
    x = np.concatenate(
        [
            np.linspace(-far, 0, 50_001),
            np.linspace(0, shift, 50_001)[1:],
            np.linspace(shift, top, 400_001)[1:],
        ]
    )
    loss = np.abs(x) ** beta - np.abs(x - shift) ** beta
    log_ratio = np.logaddexp(math.log1p(-rate), math.log(rate) + loss) if rate < 1 else loss
    power = order * log_ratio
    w = rate * np.expm1(np.minimum(loss, 700.0))
    with np.errstate(divide="ignore"):
        tiny = np.abs(order * w) < 1e-4
        small = np.log(order * (order - 1) / 2) + 2 * np.log(np.abs(w)) + (order - 2) / 3 * w
        large = np.log(np.maximum(np.expm1(np.minimum(power, 500.0)) - order * w, 1e-300))
        log_moment_minus_one = (
            np.where(tiny, small, np.where(power > 500, power, large)) - np.abs(x) ** beta
        )
    middle = np.logaddexp(log_moment_minus_one[1:], log_moment_minus_one[:-1]) - math.log(2)
    area = np.logaddexp.reduce(middle + np.log(np.diff(x)))
    return float(area - math.log(2) - math.lgamma(1 + 1 / beta))


CASES = [
    (1.0, 0.3, 2.5, 0.7),
    (1.25, 1.0, 1.3, 1.1),
    (1.5, 1.0, 8.0, 0.2),
    (1.75, 0.01, 32.0, 0.5),
    (2.0, 0.5, 3.5, 0.3),
    (2.33, 1.0, 16.0, 0.3),
    (2.33, 0.3, 3.5, 2.2),
    (3.0, 0.02, 4.0, 0.4),
    (4.0, 1.0, 2.0, 0.1),
]


@pytest.mark.parametrize(("beta", "rate", "order", "shift"), CASES)
def test_the_quadrature_is_above_the_integral_and_close(
    beta: float, rate: float, order: float, shift: float
) -> None:
    log_moment = float(log_moment_minus_one(beta, rate, np.array([order]), np.array([shift]))[0])
    with mp.workdps(30):
        truth = float(mp.log(mp.expm1(exact(beta, rate, order, shift))))
    assert truth <= log_moment <= truth + 1e-9


@given(beta=BETAS, rate=RATES, order=ORDERS, shift=SHIFTS)
@settings(max_examples=60, deadline=None)
def test_the_quadrature_agrees_with_a_fine_trapezoid(
    beta: float, rate: float, order: float, shift: float
) -> None:
    log_moment = float(log_moment_minus_one(beta, rate, np.array([order]), np.array([shift]))[0])
    assert log_moment == pytest.approx(dense(beta, rate, order, shift), rel=1e-5, abs=1e-5)


@given(
    beta=BETAS, rate=RATES, order=ORDERS, shift=SHIFTS, where=st.floats(-3, 1), seed=st.integers(0, 99)
)
@settings(max_examples=150, deadline=None)
def test_the_certificate_bounds_the_integrand_on_a_complex_disc(
    beta: float, rate: float, order: float, shift: float, where: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    side = rng.choice([-1.0, 1.0])
    u = 10**where if side > 0 else shift / 2 * rng.uniform(0.01, 0.99)
    reach = u * rng.uniform(0.001, 0.8)
    if side < 0:
        reach = min(reach, (shift - u) * 0.8)
    unit = np.ones(1)
    integrand = Integrand(beta, rate, order * unit, shift * unit, side * unit)
    with np.errstate(all="ignore"):
        bound = float(integrand.log_largest(u * unit, reach * unit)[0])
    with mp.workdps(80):
        angles = rng.uniform(0, 2 * math.pi, 20)
        for angle in angles:
            z = mp.mpf(u) + mp.mpf(reach) * mp.expj(angle)
            near, far = z ** mp.mpf(beta), (mp.mpf(shift) + side * z) ** mp.mpf(beta)
            ratio = mp.exp(far - near)

            def g(w: mp.mpc) -> mp.mpc:
                return (1 + w) ** mp.mpf(order) - 1 - mp.mpf(order) * w

            value = mp.exp(-far) * (g(rate * (ratio - 1)) + ratio * g(rate * (1 / ratio - 1)))
            if value != 0 and not math.isinf(bound):
                assert mp.log(abs(value)) <= bound + 1e-9


@pytest.mark.few(3)
@pytest.mark.parametrize("beta", [1.0, 1.3, 2.0, 2.33, 4.0])
def test_closed_forms_and_both_directions(beta: float) -> None:
    for order, shift, scale in [(1.5, 0.3, 1.0), (2, 1.0, 3.0), (7.5, 0.7, 2.0)]:
        divergence = float(CoordinateRDP(beta=beta, scale=scale)(order, shift))
        truth = float(exact(beta, 1.0, order, shift / scale) / (order - 1))
        assert truth <= divergence <= truth * (1 + 1e-8)
    # the two directions are one another's mirror image
    backward = exact(beta, 1.0, 2.0, 0.4, forward=False)
    assert float(backward) == pytest.approx(float(exact(beta, 1.0, 2.0, 0.4)), rel=1e-12)


@given(beta=BETAS, rate=SOME_RATES, order=ORDERS, small=st.floats(-6, -0.5))
@settings(max_examples=60, deadline=None)
def test_the_quadratic_bound_with_sampling(beta: float, rate: float, order: float, small: float) -> None:
    law = CoordinateRDP(beta=beta, scale=2.0, rate=rate)
    reach = 10**small * law.scale / beta / max(order, 4 - order)
    bound = float(law.curvature(np.array([order]), np.array([reach]))[0])
    for part in (1.0, 0.3):
        excess = log_moment_minus_one(
            beta, rate, np.array([order]), np.array([part * reach / law.scale])
        )
        cost = float(np.logaddexp(0, excess[0])) / (order - 1)
        assert cost <= bound * (part * reach) ** 2 * (1 + 1e-9)
    if small < -3:
        assert bound == pytest.approx(order * rate**2 * law.fisher / 2, rel=5e-3)


@pytest.mark.parametrize(
    ("beta", "order"),
    [
        *((2.0, 1.03), (4.0, 2.0)),
        *(
            pytest.param(beta, order, marks=pytest.mark.slow)
            for beta in (2.0, 2.33, 4.0, 12.0)
            for order in (1.03, 2.0, 10.0)
        ),
    ],
)
def test_the_curvature_bound_is_below_the_second_derivative(beta: float, order: float) -> None:
    law, step = CoordinateRDP(beta=beta, scale=1.0), 1e-5
    for reach in (0.03 / beta, 1 / beta):
        curvature = law.min_moment_curvature(order, reach)
        for part in (0.02, 1.0):
            below, at, above = (
                mp.exp(exact(beta, 1.0, order, part * reach + k * step)) for k in (-1, 0, 1)
            )
            bend = (above - 2 * at + below) / step**2
            assert curvature <= bend * (1 + 1e-8)
    # and no factor too low: 2% more is seen
    reach = 0.01 / beta / order
    below, at, above = (mp.exp(exact(beta, 1.0, order, reach + k * reach / 100)) for k in (-1, 0, 1))
    bend = (above - 2 * at + below) / (reach / 100) ** 2
    assert 1.02 * law.min_moment_curvature(order, reach) > bend
    assert CoordinateRDP(beta=1.9, scale=1.0).min_moment_curvature(order, reach) == 0


def test_nothing_overflows() -> None:
    orders, shifts = np.array([1.0001, 2, 64, 1e4, 1e6])[:, None], np.array([0, 1e-12, 1e-3, 1, 1e3])
    for beta in (1.0, 1.2, 2.0, 3.0):
        divergences = CoordinateRDP(beta=beta, scale=1.0)(orders, shifts)
        assert np.isfinite(divergences).all()
        assert (divergences[:, 0] == 0).all()
        assert (np.diff(divergences, axis=1) > 0).all()
        assert (np.diff(divergences, axis=0) >= -1e-8 * divergences[1:]).all()
    assert (CoordinateRDP(beta=40.0, scale=1.0)(1e6, 1e3) > 1e300).all()


def mixture(beta: float, shift: float, rate: float) -> tuple[Array, Array]:
    """Masses of the law at 0 on a fine grid, and the ratio of the mixture to it less 1."""
    far = 75 ** (1 / beta)
    x = np.concatenate([np.linspace(-far, 0, 20_001), np.linspace(0, shift, 20_001)[1:]])
    x = np.concatenate([x, np.linspace(shift, shift + 2 * far, 60_001)[1:]])
    gaps = np.diff(x)
    width = (np.append(gaps, 0) + np.append(0, gaps)) / 2
    mass = np.exp(-(np.abs(x) ** beta)) * width / 2 / math.gamma(1 + 1 / beta)
    return mass, rate * np.expm1(np.abs(x) ** beta - np.abs(x - shift) ** beta)


def directions(beta: float, order: float, shift: float, rate: float) -> tuple[float, float]:
    """D_a of the mixture from the law, and of the law from the mixture."""
    mass, w = mixture(beta, shift, rate)
    forward, backward = (
        float(mass @ ((1 + w) ** power - 1 - power * w)) for power in (order, 1 - order)
    )
    return math.log1p(forward) / (order - 1), math.log1p(backward) / (order - 1)


def covers(cost: float, divergences: tuple[float, float]) -> bool:
    return cost >= max(divergences) * (1 - 1e-6)


@given(
    beta=st.one_of(st.sampled_from([1.0, 2.0, 2.33, 4.0]), st.floats(1, 4)),
    order=st.floats(-1, 1.2).map(lambda power: 1 + 10**power),
    shift=st.floats(-1.3, 0.3).map(lambda power: 10**power),
    rate=SOME_RATES,
)
@settings(max_examples=60, deadline=None)
def test_it_covers_both_directions_and_is_the_mixtures(
    beta: float, order: float, shift: float, rate: float
) -> None:
    # scaled down so that the far peak of high orders stays on the oracle's grid
    shift /= max(1.0, order * (beta - 1))
    cost = float(CoordinateRDP(beta=beta, scale=1.0, rate=rate)(order, shift))
    forward, backward = directions(beta, order, shift, rate)
    assert covers(cost, (forward, backward))
    assert backward <= forward * (1 + 1e-6)
    assert cost == pytest.approx(forward, rel=1e-4)


def test_charging_the_wrong_direction_is_caught() -> None:
    divergences = directions(1.5, 8.0, 1.0, 0.1)
    assert covers(float(CoordinateRDP(beta=1.5, scale=1.0, rate=0.1)(8.0, 1.0)), divergences)
    assert not covers(divergences[1], divergences)


@given(
    order=st.integers(2, 60),
    shift=st.floats(-3, 1).map(lambda power: 10**power),
    rate=SOME_RATES,
    scale=st.floats(0.3, 5),
)
@settings(max_examples=40, deadline=None)
def test_normal_noise_at_whole_orders(order: int, shift: float, rate: float, scale: float) -> None:
    with mp.workdps(40):
        q, s = mp.mpf(rate), mp.mpf(shift) / mp.mpf(scale)
        terms = (
            mp.binomial(order, v) * (1 - q) ** (order - v) * q**v * mp.exp(v * (v - 1) * s**2)
            for v in range(order + 1)
        )
        truth = float(mp.log(mp.fsum(terms)) / (order - 1))
    law = CoordinateRDP(beta=2, scale=scale, rate=rate)
    divergence = float(law(order, shift))
    # float(shift) / float(scale) is itself rounded
    assert truth * (1 - 1e-14) <= divergence <= truth * (1 + 1e-11)
    by_quadrature = float(law([order, order + 0.5], shift)[0])
    assert truth * (1 - 1e-14) <= by_quadrature <= truth * (1 + 1e-8)
