"""The rounding-error bounds that the docstrings of `numerics` state, against 60 digits."""

import itertools
import math

import mpmath
import numpy as np
import pytest

from hush.accounting import numerics
from hush.accounting.numerics import UNIT, Array

mpmath.mp.dps = 60
RATES = (1e-12, 1e-5, 0.01, 1 / 3, 0.5, 0.9, 0.999, 1 - 2.0**-40)
NEGATIVE = -np.array([1e-300, 1e-17, 1e-9, 0.1, 0.68, 0.69, 0.7, 1, 5, 30, 37, 40, 700])
SIZES = [0, 1e-290, 1e-9, 1e-8, 1e-3, 0.7, math.nextafter(1, 0), 1, 2.5, 30, 700, 1e4]
LOG_RATIOS = np.array([sign * size for sign in (-1, 1) for size in SIZES])


def exact(values: Array) -> list[mpmath.mpf]:
    return [mpmath.mpf(float(value)) for value in values]


def true_mixture_ratio(rate: float, growth: float) -> mpmath.mpf:
    q, g = mpmath.mpf(rate), mpmath.mpf(float(growth))
    return mpmath.log1p(q * mpmath.expm1(g))


@pytest.mark.parametrize("rate", RATES)
def test_log_weights(rate: float) -> None:
    expected = mpmath.log1p(-mpmath.mpf(rate)), mpmath.log(mpmath.mpf(rate))
    for weights in (numerics.log_weights(rate), numerics.log_weights_numpy(rate)):
        for actual, true in zip(weights, expected, strict=True):
            assert abs(actual - true) <= 4 * UNIT * abs(true)


def test_log_weights_of_a_certain_component() -> None:
    assert numerics.log_weights(1.0) == numerics.log_weights_numpy(1.0) == (-math.inf, 0.0)


@pytest.mark.parametrize("rate", RATES)
def test_log_mixture_ratio(rate: float) -> None:
    for name in (numerics.log_weights, numerics.log_weights_numpy):
        ratios = numerics.log_mixture_ratio(rate, LOG_RATIOS, name(rate))
        for actual, g in zip(exact(ratios), LOG_RATIOS, strict=True):
            true = true_mixture_ratio(rate, g)
            if g < 1:
                assert abs(actual - true) <= 8 * UNIT / (1 - rate) * abs(true)
            else:
                assert abs(actual - true) <= 8 * UNIT * (1 + g - math.log(rate) - math.log1p(-rate))


@pytest.mark.parametrize("rate", RATES)
def test_log_mixture_ratio_absolute(rate: float) -> None:
    ratios = numerics.log_mixture_ratio_absolute(rate, LOG_RATIOS)
    for actual, g in zip(exact(ratios), LOG_RATIOS, strict=True):
        true = true_mixture_ratio(rate, g)
        error = abs(actual - true)
        if abs(g) < 1e-8:
            assert error <= 8 * UNIT / (1 - rate) * abs(true)
        assert error <= 8 * UNIT * (1 + max(abs(g), -math.log(rate), -math.log1p(-rate)))


def test_log_mixture_ratio_of_a_certain_component_is_the_ratio() -> None:
    for function in (numerics.log_mixture_ratio, numerics.log_mixture_ratio_absolute):
        assert function(1.0, LOG_RATIOS) is LOG_RATIOS


@pytest.mark.parametrize("rate", RATES)
def test_log_mixture(rate: float) -> None:
    logs = np.array([-1e4, -40, -1e-9, 0, 3])
    for p, q in itertools.product(logs, logs):
        actual = mpmath.mpf(float(numerics.log_mixture(numerics.log_weights(rate), p, q)))
        weight = mpmath.mpf(rate)
        true = mpmath.log((1 - weight) * mpmath.exp(float(p)) + weight * mpmath.exp(float(q)))
        size = max(abs(p), abs(q), -math.log(rate), -math.log1p(-rate))
        assert abs(actual - true) <= 8 * UNIT * (1 + size)


def test_log_mixture_of_a_certain_component() -> None:
    assert float(numerics.log_mixture(numerics.log_weights(1.0), 5.0, -2.0)) == -2.0
    assert float(numerics.log_mixture(numerics.log_weights(0.5), -math.inf, -math.inf)) == -math.inf


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("n", [2, 3, 50, 1024, 100_000])
def test_log_binomial(rate: float, n: int) -> None:
    k = np.unique(np.array([0, 1, 2, n // 3, n // 2, n - 1, n], dtype=float))
    for function in (numerics.log_binomial, numerics.log_binomial_in_turn):
        for actual, successes in zip(exact(function(n, k, numerics.log_weights(rate))), k, strict=True):
            count = int(successes)
            true = mpmath.log(mpmath.binomial(n, count)) + count * mpmath.log(mpmath.mpf(rate))
            true += (n - count) * mpmath.log1p(-mpmath.mpf(rate))
            size = 1 + math.lgamma(n + 1) - count * math.log(rate) - (n - count) * math.log1p(-rate)
            assert abs(actual - true) <= 32 * UNIT * size


@pytest.mark.parametrize("offset", [-1e5, 0.0, 1e5])
def test_log_sum_exp(offset: float) -> None:
    rng = np.random.default_rng(1)
    for n in (1, 2, 1000):
        terms = offset + rng.uniform(-50, 0, size=(3, n))
        sums = numerics.log_sum_exp(terms)
        for row, actual in zip(terms, sums, strict=True):
            true = mpmath.log(mpmath.fsum(mpmath.exp(term) for term in exact(row)))
            bound = UNIT * (16 + 4 * math.log2(n) + abs(float(actual)))
            assert abs(mpmath.mpf(float(actual)) - true) <= bound
            assert abs(mpmath.mpf(numerics.log_sum_exp_scalar(row)) - true) <= bound


def test_log_sum_exp_of_nothing_and_of_infinity() -> None:
    terms = np.array([[-np.inf, -np.inf], [-np.inf, 3.0]])
    assert numerics.log_sum_exp(terms).tolist() == [-math.inf, 3.0]
    assert numerics.log_sum_exp(np.zeros((1, 0))).tolist() == [-math.inf]


def test_log1mexp() -> None:
    for actual, near, x in zip(
        exact(numerics.log1mexp(NEGATIVE)),
        exact(numerics.log1mexp_relative(NEGATIVE)),
        exact(NEGATIVE),
        strict=True,
    ):
        true = mpmath.log1p(-mpmath.exp(x))
        assert abs(actual - true) <= 4 * UNIT * (1 + abs(true))
        assert abs(near - true) <= 8 * UNIT * abs(true)
    assert numerics.log1mexp(np.array([0.0, -np.inf])).tolist() == [-math.inf, 0.0]


def test_log_expm1() -> None:
    values = -NEGATIVE
    for actual, x in zip(exact(numerics.log_expm1(values)), exact(values), strict=True):
        true = mpmath.log(mpmath.expm1(x))
        assert abs(actual - true) <= 8 * UNIT * (1 + abs(x) + abs(true))
    assert numerics.log_expm1(np.array([0.0, 1e6])).tolist() == [-math.inf, 1e6]


@pytest.mark.parametrize("order", [1.0001, 1.5, 2, 3, 17.3, 256, 1024, 1e6])
def test_log_convex_remainder(order: float) -> None:
    near = np.geomspace(1e-12, 30, 60)
    switch = 1e-3 / order
    ratios = np.concatenate([-near, near, [switch, math.nextafter(switch, 1), -switch, -600, 500]])
    for actual, t in zip(
        exact(numerics.log_convex_remainder(ratios, order)), exact(ratios), strict=True
    ):
        a = mpmath.mpf(order)
        true = mpmath.log(mpmath.expm1(a * t) - a * mpmath.expm1(t))
        assert abs(actual - true) <= 2e-12 + 8 * UNIT * (1 + order * abs(t)), float(t)


def test_log_convex_remainder_of_no_change_and_of_no_mass() -> None:
    remainders = numerics.log_convex_remainder(np.array([0.0, -1e9]), 3.0)
    assert remainders[0] == -math.inf
    assert remainders[1] == pytest.approx(math.log(2.0), rel=1e-12)


def test_bisection_keeps_the_bracket_and_ends_at_neighbouring_doubles() -> None:
    low, high = numerics.bisect(lambda x: x * x < 2, 1.0, 2.0)
    assert low**2 < 2 <= high**2
    assert high == math.nextafter(low, 2)
    # downward, and where the crossing is the smallest double
    assert numerics.bisect(lambda x: x > 0.3, 1.0, 0.0)[1] == 0.3
    assert numerics.bisect(lambda x: x <= 0, 0.0, 1e300) == (0.0, 5e-324)


def test_bisection_ends_after_its_rounds_or_at_its_tolerance() -> None:
    assert numerics.bisect(lambda x: x < 0.3, 0.0, 1.0, rounds=3) == (0.25, 0.375)
    low, high = numerics.bisect(lambda x: x < 700.3, 0.0, 1e4, tolerance=1e-6)
    assert low < 700.3 <= high
    assert 1e-8 < high - low <= 7.1e-4


@pytest.mark.parametrize("ends", [(1.0, 1.0), (0.0, math.nan), (1e308, 1.7e308)])
def test_bisection_ends_where_there_is_no_middle(ends: tuple[float, float]) -> None:
    bracket = numerics.bisect(lambda x: False, *ends)
    assert bracket[0] == ends[0]
