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
def test_log_mixture(rate: float) -> None:
    logs = np.array([-1e4, -40, -1e-9, 0, 3])
    for p, q in itertools.product(logs, logs):
        actual = mpmath.mpf(float(numerics.log_mixture(numerics.log_weights(rate), p, q)))
        weight = mpmath.mpf(rate)
        true = mpmath.log((1 - weight) * mpmath.exp(float(p)) + weight * mpmath.exp(float(q)))
        size = max(abs(p), abs(q), -math.log(rate), -math.log1p(-rate))
        assert abs(actual - true) <= 8 * UNIT * (1 + size)


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


def test_bisection_keeps_the_bracket_and_ends_at_neighbouring_doubles() -> None:
    low, high = numerics.bisect(lambda x: x * x < 2, 1.0, 2.0)
    assert low**2 < 2 <= high**2
    assert high == math.nextafter(low, 2)
    # downward, and where the crossing is the smallest double
    assert numerics.bisect(lambda x: x > 0.3, 1.0, 0.0)[1] == 0.3
    assert numerics.bisect(lambda x: x <= 0, 0.0, 1e300) == (0.0, 5e-324)
