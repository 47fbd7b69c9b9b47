import numpy as np
import pytest

from hush.gradients.geometry import Geometry, geometry
from hush.report.geometry import advice, numbers


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
    measured = numbers(uniform_geometry(0.9, 0.1))
    norms, ranks = np.array([0.9, np.sqrt(1 - 0.81)]), np.array([1, 9_999])
    expected = (norms @ np.sqrt(ranks)) ** 2 / 10_000
    assert measured["split"]["ranks"] == [1, 9_999]
    assert measured["split"]["variance_ratio"] == pytest.approx(expected)
    assert measured["split"]["gain"] == pytest.approx(1 / expected)
    assert measured["entries_at_cap"] == pytest.approx(100)
    assert measured["linf_cap"] == pytest.approx(0.1)


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
    import torch

    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(80, 4000, generator=generator)
    assert advice(geometry(rows[:40], rows[40:]))[0].startswith("subspaces do not pay")
