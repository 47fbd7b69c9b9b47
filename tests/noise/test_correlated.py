"""Strategies of correlated noise: column norm, stability, and the error that they minimize."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from scipy.linalg import toeplitz
from scipy.optimize import minimize
from scipy.special import binom

import hush
from hush.core.errors import InvalidValue
from hush.noise.correlated import impulse_response, optimal_strategy, square_root_strategy

Array = npt.NDArray[np.float64]


def dense(column: npt.ArrayLike, steps: int) -> Array:
    """Lower-triangular Toeplitz matrix of a first column."""
    first = np.zeros(steps)
    known = np.asarray(column, dtype=float)[:steps]
    first[: len(known)] = known
    return np.asarray(toeplitz(first, np.zeros(steps)))


def sgd(steps: int, momentum: float, decay: float) -> Array:
    """Weights after each step as a matrix of the gradients, by the recursion of torch's SGD."""
    columns = []
    for pulse in range(steps):
        weight, buffer, weights = 0.0, 0.0, []
        for t in range(steps):
            buffer = momentum * buffer + (-1.0 if t == pulse else 0.0) + decay * weight
            weight -= buffer
            weights.append(weight)
        columns.append(weights)
    return np.array(columns).T


def squared_error(workload: Array, strategy: npt.ArrayLike) -> float:
    """Mean squared error of a factorization, times the squared norm of its widest column."""
    matrix = dense(strategy, len(workload))
    factor = workload @ np.linalg.inv(matrix)
    return float((factor**2).sum() / len(workload) * (np.asarray(strategy) ** 2).sum())


@pytest.mark.parametrize(
    "strategy",
    [
        (1.0,),
        (1.0, 0.5),
        (3, 2, 1),
        (4, 3),
        (0.8, 0.6),
        [1e-3, -1e-4],
        (0.3,) * 7,
        np.linspace(1, 0.1, 50).tolist(),
    ],
)
def test_the_column_norm_is_at_most_one_exactly(strategy: list[float]) -> None:
    noise = hush.Banded(multiplier=1.0, strategy=strategy)
    norm = sum(Fraction(value) ** 2 for value in noise.strategy)
    assert 1 - Fraction(1, 10**6) < norm <= 1
    np.testing.assert_allclose(
        np.array(noise.strategy) / noise.strategy[0], np.array(strategy) / strategy[0], atol=1e-6
    )
    again = hush.Banded(multiplier=2.0, strategy=noise.strategy)
    assert again.strategy == noise.strategy, "the coefficients of a stored plan do not change"


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        ((), "non-empty list"),
        ((0.0, 1.0), "the first one positive"),
        ((-1.0, 0.5), "the first one positive"),
        ((1e-9, 1.0), "too small"),
        ((1.0, float("nan")), "finite number"),
        ((1.0, 2.0), "inside the unit circle"),
        ((1.0,) * 1025, "1 to 1024"),
    ],
)
def test_other_strategies_raise(strategy: tuple[float, ...], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        hush.Banded(multiplier=1.0, strategy=strategy)


def test_the_workload_is_that_of_torchs_sgd() -> None:
    for momentum, decay in ((0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)):
        found = dense(impulse_response(12, momentum, decay), 12)
        np.testing.assert_allclose(found, sgd(12, momentum, decay), rtol=1e-10, atol=1e-12)


def test_the_start_for_prefix_sums_is_the_closed_form() -> None:
    found = square_root_strategy(6, impulse_response(6))
    np.testing.assert_allclose(found, [abs(binom(-0.5, k)) for k in range(6)], rtol=1e-12)


SETTINGS = [(2, 8, 0.0, 0.0), (3, 10, 0.0, 0.0), (4, 12, 0.9, 0.0), (3, 9, 0.5, 0.2), (6, 6, 0.0, 0.0)]


@pytest.mark.parametrize(("bands", "steps", "momentum", "decay"), SETTINGS)
def test_the_strategy_is_optimal(bands: int, steps: int, momentum: float, decay: float) -> None:
    """No start of another optimizer, on dense matrices, finds a smaller error."""
    workload, generator = sgd(steps, momentum, decay), np.random.default_rng(0)
    found = optimal_strategy(bands, impulse_response(steps, momentum, decay))
    error = squared_error(workload, found)
    assert error <= squared_error(workload, square_root_strategy(bands, impulse_response(steps)))
    for _ in range(5):
        start = generator.uniform(0, 0.8, bands - 1)
        other = minimize(
            lambda rest: squared_error(workload, [1.0, *rest]),
            start,
            method="Nelder-Mead",
            options={"xatol": 1e-8, "fatol": 1e-12, "maxiter": 20_000, "maxfev": 20_000},
        )
        assert error <= other.fun * (1 + 1e-7)


@pytest.mark.parametrize(("bands", "steps", "momentum", "decay"), SETTINGS)
def test_the_relative_error(bands: int, steps: int, momentum: float, decay: float) -> None:
    noise = hush.Banded.optimal(bands=bands, multiplier=1.0, steps=steps, momentum=momentum, decay=decay)
    workload = sgd(steps, momentum, decay)
    ratio = squared_error(workload, noise.strategy) / squared_error(workload, [1.0])
    assert noise.relative_error(steps, momentum, decay) == pytest.approx(ratio**0.5, rel=1e-6)
    assert ratio < 1


def test_more_bands_help_in_a_long_run() -> None:
    errors = [
        hush.Banded.optimal(bands=bands, multiplier=1.0, steps=2000, momentum=0.9).relative_error(
            2000, 0.9
        )
        for bands in (1, 2, 8, 32)
    ]
    assert errors[0] == pytest.approx(1.0)
    assert all(more < fewer for fewer, more in pairwise(errors))
    assert errors[-1] < 0.2


def test_arguments_of_the_optimization_are_checked() -> None:
    with pytest.raises(InvalidValue, match="takes too long"):
        hush.Banded.optimal(bands=2000, multiplier=1.0, steps=10)
    with pytest.raises(InvalidValue, match="momentum=1"):
        hush.Banded.optimal(bands=2, multiplier=1.0, steps=10, momentum=1.0)
