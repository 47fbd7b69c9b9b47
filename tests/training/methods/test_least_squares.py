"""Noisy sufficient statistics: what one record can change, the noise that is charged, the solution."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

import hush
from hush.core.errors import DataError
from hush.training.methods import least_squares
from hush.training.methods.least_squares import NoisyLeastSquares, posterior_mean
from tests.training.helpers import seeded

SOLVER = NoisyLeastSquares(multiplier=2.0, row_norm=1.5, target_norm=0.5)
BOUND = math.sqrt(2) * 1.5**2


def table(records: int, columns: int = 3, targets: int = 2, seed: int = 5) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    inputs = torch.rand(records, columns, generator=generator, dtype=torch.float64) * 2 - 1
    values = torch.rand(records, targets, generator=generator, dtype=torch.float64) - 0.5
    return inputs, values


def vector_of(row: Any, values: Any, weighted: bool = True) -> np.ndarray:
    """What one record adds, written out entry by entry."""
    x = [1.0, *map(float, row)]
    factor = SOLVER.row_norm / SOLVER.target_norm
    entries = [
        x[i] * x[j] * (1.0 if i == j else 2**0.5) for i in range(len(x)) for j in range(i, len(x))
    ]
    entries += [factor * x[i] * float(value) for i in range(len(x)) for value in values]
    vector = np.array(entries)
    norm = float(np.sqrt(np.sum(vector**2)))
    return vector * min(1.0, BOUND / norm) if weighted else vector


def test_the_sum_is_that_of_outer_products_one_record_at_a_time() -> None:
    inputs, targets = table(1030)  # two blocks
    inputs[::7] *= 10  # some beyond the bounds
    expected = sum(vector_of(row, value) for row, value in zip(inputs, targets, strict=True))
    assert SOLVER._clipped_sum(inputs, targets).numpy() == pytest.approx(expected, rel=1e-12, abs=1e-10)


RECORD = st.lists(st.floats(-1e6, 1e6), min_size=5, max_size=5)


@given(RECORD)
def test_one_record_moves_the_sum_by_the_bound_at_most(record: list[float]) -> None:
    inputs, targets = table(20)
    one = torch.tensor(record, dtype=torch.float64)
    before = SOLVER._clipped_sum(inputs, targets)
    after = SOLVER._clipped_sum(torch.cat([inputs, one[None, :3]]), torch.cat([targets, one[None, 3:]]))
    assert float((after - before).norm()) <= BOUND * (1 + 2**-16)


def test_the_bound_is_attained_within_the_declared_norms() -> None:
    """Noise for a smaller bound would be too little."""
    row = torch.tensor([[1.0, 0.5, 0.0]], dtype=torch.float64)  # with the constant: norm 1.5
    value = torch.tensor([[0.3, 0.4]], dtype=torch.float64)  # norm 0.5
    assert float(SOLVER._clipped_sum(row, value).norm()) == pytest.approx(BOUND)
    assert SOLVER.plan.clipping.reference_norm == pytest.approx(BOUND)


def test_a_sum_without_the_weight_moves_by_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_squares, "clipping_weights", lambda _, norms: torch.ones_like(norms))
    inputs, targets = table(20)
    beyond = torch.full((1, 3), 3.0, dtype=torch.float64)
    moved = SOLVER._clipped_sum(torch.cat([inputs, beyond]), torch.cat([targets, targets[:1]]))
    assert float((moved - SOLVER._clipped_sum(inputs, targets)).norm()) > 4 * BOUND


def test_the_noise_is_the_noise_that_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(least_squares, "posterior_mean", dict)
    solve: Any = SOLVER  # returns the arguments of `posterior_mean`
    records = table(50, columns=20, targets=3)
    location, draws = SOLVER._clipped_sum(*records).numpy(), []
    first, second = np.triu_indices(21)
    for seed in range(8):
        noisy = solve(*records, hush.Ledger(), generator=seeded(seed))
        assert noisy["gram"] == pytest.approx(noisy["gram"].T, abs=0)
        triangle = noisy["gram"][first, second] * np.where(first == second, 1.0, 2**0.5)
        draws += [*(np.concatenate([triangle, 3 * noisy["moments"].ravel()]) - location)]
    deviation = SOLVER.multiplier * BOUND
    assert stats.kstest(np.array(draws) / deviation, "norm").pvalue > 1e-3
    assert stats.kstest(np.array(draws) / (0.7 * deviation), "norm").pvalue < 1e-6
    assert noisy["gram_deviation"] == pytest.approx(deviation, rel=1e-4)
    assert noisy["moment_deviation"] == pytest.approx(deviation / 3, rel=1e-4)


def test_the_charge_is_that_of_one_gaussian_release() -> None:
    ledger = hush.Ledger()
    SOLVER(*table(30), ledger)
    assert ledger.counts == {SOLVER.plan: 1}
    guarantee = ledger.epsilon(1e-5)
    assert (guarantee.arithmetic, guarantee.randomness, guarantee.records) == ("proved", "secret", 30)
    eps, m = guarantee.epsilon.upper, SOLVER.multiplier
    norm = stats.norm
    delta = norm.cdf(0.5 / m - eps * m) - math.exp(eps) * norm.cdf(-0.5 / m - eps * m)
    assert delta == pytest.approx(1e-5, rel=1e-3)
    assert SOLVER.guarantee(1e-5).epsilon == guarantee.epsilon


def noisy_statistics(seed: int, noise: float) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    rows = np.hstack([np.ones((200, 1)), draw.uniform(-1, 1, (200, 4))])
    values = rows @ draw.normal(size=(5, 2)) * 0.2 + 0.05 * draw.normal(size=(200, 2))
    error = draw.normal(size=(5, 5)) * noise / 2**0.5
    return {
        "gram": rows.T @ rows + np.triu(error) + np.triu(error, 1).T,
        "moments": rows.T @ values + noise * draw.normal(size=(5, 2)),
        "gram_deviation": noise,
        "moment_deviation": noise,
        "records": 200,
        "target_norm": 1.0,
    }


@pytest.mark.parametrize("noise", [1.0, 20.0])
def test_the_posterior_mean_is_that_of_the_joint_normal_law(noise: float) -> None:
    released = noisy_statistics(3, noise)
    total = min(released["gram"][0, 0], 200.0)
    means, middle = released["gram"][0, 1:] / total, released["moments"][0] / total
    gram = released["gram"][1:, 1:] - total * np.outer(means, means)
    moments = released["moments"][1:] - total * np.outer(means, middle)
    values, directions = np.linalg.eigh(gram)
    gram = directions @ np.diag(np.maximum(values, 0)) @ directions.T
    square = np.mean(means**2)
    from_moments = noise**2 * (1 + square) + noise**2 / 2 * np.mean(middle**2)
    best: tuple[float, Any] = (-math.inf, None)
    for prior in least_squares._PRIORS:
        from_gram = noise**2 / 2 * (1 + 2 * square) * 4 * prior
        for residual in least_squares._RESIDUALS:
            error = residual * gram + (from_moments + from_gram) * np.eye(4)
            joint = prior * gram @ gram + error
            law = stats.multivariate_normal(np.zeros(4), joint)
            likelihood = law.logpdf(moments[:, 0]) + law.logpdf(moments[:, 1])
            if likelihood > best[0]:
                best = likelihood, prior * gram @ np.linalg.solve(joint, moments)
    actual = posterior_mean(**released)
    assert actual.coefficients == pytest.approx(best[1], rel=1e-6, abs=1e-9)
    assert actual.intercept == pytest.approx(middle - means @ actual.coefficients)


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.ones(4, 2), torch.ones(4)),
        (torch.ones(4, 2), torch.ones(3, 1)),
        (torch.ones(0, 2), torch.ones(0, 1)),
        (torch.full((4, 2), math.nan), torch.ones(4, 1)),
        (torch.ones(4, 2), torch.full((4, 1), math.inf)),
    ],
)
def test_rows_are_finite_numbers_one_a_record(inputs: Tensor, targets: Tensor) -> None:
    ledger = hush.Ledger()
    with pytest.raises(DataError):
        SOLVER(inputs, targets, ledger)
    assert not ledger.counts
