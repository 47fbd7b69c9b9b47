"""What is measured, against the same quantities from full decompositions in numpy."""

import numpy as np
import pytest
import torch
from torch import Tensor

from hush_recipes.twice.measured import Geometry, advice, best_subspace_split, geometry, split


def rows(seed: int, records: int, dimension: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = 0.9 ** torch.arange(dimension)
    mixing = torch.randn(dimension, dimension, generator=torch.Generator().manual_seed(99))
    values: Tensor = (torch.randn(records, dimension, generator=generator) * spread) @ mixing
    return values + 0.3


def unit(values: Tensor) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    exact = values.double().numpy()
    return exact / np.linalg.norm(exact, axis=1, keepdims=True)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("records", "dimension"), [(20, 50), (60, 40), (1, 5)])
def test_norms_inside_and_outside_of_principal_subspaces(records: int, dimension: int) -> None:
    public, measured = rows(0, records, dimension), rows(1, 30, dimension)
    directions = np.linalg.svd(unit(public), full_matrices=False)[2]
    exact = unit(measured)
    result = geometry(public.clone(), measured.clone())
    assert result.dimension == dimension
    assert result.principal.shape == result.residual.shape == (30, min(records, dimension))
    for k in range(result.principal.shape[1]):
        inside = exact @ directions[: k + 1].T
        outside = exact - inside @ directions[: k + 1]
        assert result.principal[:, k] == pytest.approx(np.linalg.norm(inside, axis=1), abs=1e-3)
        assert result.residual[:, k] == pytest.approx(np.linalg.norm(outside, axis=1), abs=1e-3)


def test_entries_sparsity_and_variation() -> None:
    public, measured = rows(0, 40, 80), rows(1, 30, 80)
    exact, order = unit(measured), np.argsort(-np.abs(unit(public)).mean(0))
    result = geometry(public.clone(), measured.clone())
    assert result.largest == pytest.approx(np.sort(np.abs(exact).max(1)), rel=1e-5)
    for share, value in zip(result.shares, result.dropped, strict=True):
        dropped = exact[:, order[round(share * 80) :]]
        assert value == pytest.approx(np.linalg.norm(dropped, axis=1).mean(), abs=1e-4)
    assert result.shares[0] == 0
    assert result.dropped[0] == pytest.approx(1, abs=1e-6)
    assert result.dropped[-1] < 1e-3
    assert result.variation == pytest.approx(np.sort(np.abs(exact.std(0) / exact.mean(0))), rel=1e-3)
    assert result.cap == pytest.approx(np.quantile(np.abs(exact).max(1), 0.99), rel=1e-5)
    assert (np.abs(exact).max(1) > result.cap).mean() <= 0.05
    assert result.entries == pytest.approx(result.cap**-2)


def test_the_variance_of_the_papers_example() -> None:
    # Section 6 of 003: 5.5 times smaller for norms 2.5 and 1 in 1,000 of 291,898 dimensions.
    ones = np.ones((3, 1000))
    result = Geometry(
        dimension=291_898,
        principal=2.5 * ones,
        residual=ones,
        shares=np.zeros(1),
        dropped=np.zeros(1),
        largest=np.ones(3),
        variation=np.zeros(1),
    )
    example = split(result, 1000)
    assert example.ranks == (1000, 290_898)
    assert 1 / example.ratio == pytest.approx(5.5, abs=0.05)
    assert example.kept == pytest.approx(np.hypot(2.5, 1))


def test_the_best_split_is_the_best_of_all_against_a_search_over_shapes() -> None:
    result = geometry(rows(0, 20, 50), rows(1, 200, 50))
    best = best_subspace_split(result)
    candidates = [split(result, rank) for rank in range(1, 21)]
    assert best.gain == max(candidate.gain for candidate in candidates)
    for candidate in candidates:
        # Theorem 4.6 by search: variances a, b with c1^2/a + c2^2/b = 1/(c1^2 + c2^2)-equal privacy
        norms, ranks = np.array(candidate.norms), np.array(candidate.ranks)
        shapes = np.linspace(1e-3, 1 - 1e-3, 4001)
        shares = np.stack([shapes, 1 - shapes])
        scale = (norms[:, None] ** 2 / shares).sum(0)
        variance = (ranks[:, None] * shares * scale).sum(0).min() / (50 * (norms**2).sum())
        assert candidate.ratio == pytest.approx(variance, rel=1e-3)
        assert candidate.ratio <= 1 + 1e-12
        assert candidate.kept <= 1 + 1e-6


def uniform_geometry(principal: float, largest: float, dimension: int = 10_000) -> Geometry:
    """Records that all have the same norm within 1 to 50 principal directions."""
    inside = np.full((100, 50), principal)
    return Geometry(
        dimension=dimension,
        principal=inside,
        residual=np.sqrt(1 - inside**2),
        shares=np.linspace(0, 1, 41),
        dropped=np.linspace(1, 0, 41),
        largest=np.full(100, largest),
        variation=np.ones(dimension),
    )


def test_numbers_are_those_of_the_theorem() -> None:
    measured = uniform_geometry(0.9, 0.1)
    best = best_subspace_split(measured)
    norms, ranks = np.array([0.9, np.sqrt(1 - 0.81)]), np.array([1, 9_999])
    expected = (norms @ np.sqrt(ranks)) ** 2 / 10_000
    assert best.ranks == (1, 9_999)
    assert best.ratio == pytest.approx(expected)
    assert best.gain == pytest.approx(1 / expected)
    assert measured.entries == pytest.approx(100)
    assert measured.cap == pytest.approx(0.1)


def test_what_does_not_pay_is_said_not_to() -> None:
    good = advice(uniform_geometry(0.95, 0.05))
    assert "it did worse than equal noise" in good[0]
    assert good[0].startswith("subspaces pay")
    assert "has all of its possible gain" in good[1]
    assert "most of its possible gain" in advice(uniform_geometry(0.95, 0.2))[1]
    assert "part of its possible gain" in advice(uniform_geometry(0.95, 0.5))[1]
    bad = advice(uniform_geometry(0.01, 0.9))
    assert "it did worse" not in bad[0]
    assert bad[0].startswith("subspaces do not pay")
    assert bad[1].startswith("an l-infinity cap does not pay")


def test_noise_without_any_structure_gets_no_recommendation_of_subspaces() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(80, 4000, generator=generator)
    assert advice(geometry(rows[:40], rows[40:]))[0].startswith("subspaces do not pay")
