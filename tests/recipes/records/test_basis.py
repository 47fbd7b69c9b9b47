"""Inputs in a drawn basis: white in it, of length 1, and of one record each."""

import pytest
import torch

from hush_recipes.records.basis import Features, principal_scaling, public_inputs


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_with_an_exponent_of_a_half_the_drawn_directions_are_white() -> None:
    mixing = torch.randn(6, 6, generator=seeded(2))
    first, second = torch.randn(2, 400, 6, generator=seeded(3)) @ mixing + 5.0
    rows = torch.cat([first, second])
    mean, basis = principal_scaling(first, second, Features(exponent=0.5, floor=0.0, directions=4))
    white = (rows - mean) @ basis
    torch.testing.assert_close(white.T @ white / 800, torch.eye(4), atol=1e-3, rtol=0)
    # the four that were kept are those of the largest variance
    singular = torch.linalg.svdvals(rows - rows.mean(0))
    torch.testing.assert_close(basis.norm(dim=0) ** -2, singular[:4] ** 2 / 800, rtol=1e-3, atol=0)
    within = Features(exponent=0.5, floor=0.0, directions=6, between=0.0)
    _, basis = principal_scaling(first, second, within)
    differences = (first - second) @ basis
    torch.testing.assert_close(differences.T @ differences / 800, torch.eye(6), atol=1e-3, rtol=0)


@pytest.mark.parametrize("directions", [0, 9])
def test_inputs_are_functions_of_one_record_and_have_length_one(directions: int) -> None:
    features = Features(directions=directions)
    records = torch.rand(30, 27, 2, 2, generator=seeded(1))
    drawn = torch.rand(2, 50, 27, 2, 2, generator=seeded(2))
    basis = (drawn[0], drawn[1]) if directions else None
    (both,) = public_inputs([records], basis, features)
    (alone,) = public_inputs([records[7:8]], basis, features)
    assert both.shape == ((30, 9, 1) if directions else (30, 27, 4))
    torch.testing.assert_close(both[7:8], alone)
    torch.testing.assert_close(both.flatten(1).norm(dim=1), torch.ones(30))
