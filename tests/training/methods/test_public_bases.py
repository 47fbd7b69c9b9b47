"""Principal subspaces of public gradients, and the thresholds in them, against explicit computations."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import hush
from hush.clipping.blocks import Principal
from hush.core.errors import DataError
from hush.training.methods.public_bases import principal_basis, principal_directions
from tests.gradients.oracle import one_at_a_time
from tests.training.helpers import seeded

LOSS = nn.CrossEntropyLoss()
EACH = nn.CrossEntropyLoss(reduction="none")


def problem(records: int = 60) -> tuple[nn.Module, tuple[Tensor, Tensor], int]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Dropout(0.3), nn.Linear(20, 6))
    size = sum(parameter.numel() for parameter in model.parameters())
    return model, (torch.randn(records, 12), torch.randint(0, 6, (records,))), size


def falling(records: int, length: int, fall: float, seed: int) -> Tensor:
    """Rows whose singular values fall by a factor from each to the next."""
    own = seeded(seed)
    count = min(records, length)
    left = torch.linalg.qr(torch.randn(records, count, generator=own, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(length, count, generator=own, dtype=torch.float64))[0]
    values: Tensor = left * fall ** torch.arange(count, dtype=torch.float64) @ right.T
    return values.float()


def crookedness(basis: Tensor) -> float:
    exact = basis.double()
    if exact.shape[1] == 0:
        return 0.0
    return float((exact.T @ exact - torch.eye(exact.shape[1], dtype=torch.float64)).abs().max())


def test_subspaces_are_those_of_the_decomposition() -> None:
    rows = falling(80, 300, 0.7, seed=1)
    right = torch.linalg.svd(rows.double(), full_matrices=False)[2]
    actual = principal_directions(rows.clone(), (3, 5), 16, seeded()).double()
    for part, start, end in ((actual[:, :3], 0, 3), (actual[:, 3:], 3, 8)):
        # the sines of the angles between the two subspaces
        missed = torch.linalg.matrix_norm(part - right[start:end].T @ (right[start:end] @ part), ord=2)
        assert float(missed) < 1e-2


@pytest.mark.parametrize("iterations", [1, 12])
def test_more_rounds_leave_less_over(iterations: int) -> None:
    rows = falling(80, 300, 0.95, seed=2)
    best = float(torch.linalg.svdvals(rows.double())[10:].square().sum().sqrt())
    remaining = rows.clone()
    principal_directions(remaining, (4, 6), iterations, seeded())
    ratio = float(torch.linalg.norm(remaining)) / best
    assert 1 - 1e-5 <= ratio <= {1: 1.25, 12: 1.01}[iterations]
    # random directions leave nearly everything
    random = torch.linalg.qr(torch.randn(300, 10, generator=seeded()))[0]
    assert float(torch.linalg.norm(rows - rows @ random @ random.T)) / best > 1.4


@pytest.mark.parametrize(
    ("records", "length", "ranks"),
    [(40, 4000, (5, 10, 20)), (40, 40, (10, 30)), (5, 30, (10, 15)), (3, 3, (1, 2)), (4, 6, (0, 2))],
)
def test_columns_are_orthonormal_to_one_in_a_million(
    records: int, length: int, ranks: tuple[int, ...]
) -> None:
    for fall in (0.2, 0.99):  # the first leaves singular values far below single precision
        basis = principal_directions(falling(records, length, fall, 4), ranks, 3, seeded())
        assert basis.shape == (length, sum(ranks))
        assert basis.dtype == torch.float32
        assert crookedness(basis) < 1e-6


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
def test_random_directions_complete_a_basis_of_few_directions(size: float) -> None:
    one = torch.randn(1, 2000, generator=seeded())
    cases = [
        (one.repeat(64, 1), (5, 5, 5)),
        (falling(64, 700, 0.9, seed=7)[:, :1] * one[:, :700], (60,)),
        (torch.zeros(4, 50), (3, 4)),
    ]
    for rows, ranks in cases:
        assert crookedness(principal_directions(rows * size, ranks, 4, seeded())) < 1e-6


def test_gradients_without_a_basis_are_refused() -> None:
    with pytest.raises(DataError, match="no orthonormal basis"):
        principal_directions(torch.full((20, 30), math.nan), (3,), 2, seeded())


def test_a_basis_covers_all_parameters_and_has_the_given_ranks() -> None:
    model, public, size = problem()
    for groups in (1, 2, 3, 4, 9):
        basis = principal_basis(
            model, LOSS, public, (7, 30, size - 37), Principal(groups=groups), seeded()
        )
        assert basis.names == tuple(name for name, _ in model.named_parameters())
        assert list(basis.sizes.values()) == [7, 30, size]
        assert len(basis.groups) <= groups
        for group in basis.groups:
            assert crookedness(group.basis) < 1e-6
            share = len(group.basis) / size
            assert abs(sum(group.columns) - 37 * share) <= len(basis.groups)


def test_it_finds_the_subspaces_of_each_group_of_gradients() -> None:
    model, public, size = problem()
    model.eval()
    frame = principal_basis(
        model, LOSS, public, (20, size - 20), Principal(groups=2, iterations=10), seeded()
    )
    gradients = one_at_a_time(model, EACH, *public, 60).double()
    for group, own in frame._by_group(gradients):
        best = torch.linalg.svdvals(own)[sum(group.columns) :].norm()
        basis = group.basis.double()
        remaining = torch.linalg.norm(own - own @ basis @ basis.T)
        assert float(best) * (1 - 1e-6) <= float(remaining) <= 1.02 * float(best)


def test_too_few_public_records_raise_an_error_with_the_number_needed() -> None:
    model, public, size = problem(29)
    ranks = (30, size - 30)
    with pytest.raises(DataError, match="at least 30 public records"):
        principal_basis(model, LOSS, public, ranks, Principal(groups=1), seeded())
    # two groups need a share of them
    assert principal_basis(model, LOSS, public, ranks, Principal(groups=2), seeded()).sizes


def test_records_whose_gradient_is_not_finite_are_left_out() -> None:
    model, (x, y), size = problem(20)
    x[7] = math.inf
    basis = principal_basis(model, LOSS, (x, y), (19, size - 19), Principal(groups=1), seeded())
    assert all(bool(group.basis.isfinite().all()) for group in basis.groups)
    with pytest.raises(DataError, match="19 public records with finite"):
        principal_basis(model, LOSS, (x, y), (20, size - 20), Principal(groups=1), seeded())


def test_thresholds_share_the_norm_as_the_gradients_of_other_public_records() -> None:
    model, (x, y), size = problem(200)
    model.eval()
    ranks, bases = (4, 9, size - 13), Principal(groups=2)
    fit = partial(hush.public_thresholds, model, EACH, (x, y), ranks=ranks, norm=2.0, bases=bases)
    clipping = fit(entries=True, quantile=0.9)
    assert math.hypot(*clipping.l2) == pytest.approx(2.0)
    # the basis of the first 120 records, and the gradients of the others, one at a time
    basis = principal_basis(model, EACH, (x[:120], y[:120]), ranks, bases, seeded())
    gradients = one_at_a_time(model, EACH, x[120:], y[120:], 80)
    blocks = [block.double() for block in basis.blocks(gradients).values()]
    expected = torch.stack([block.norm(dim=1).mean() for block in blocks])
    shares = torch.tensor(clipping.l2, dtype=torch.float64)
    torch.testing.assert_close(shares, 2 * expected / expected.norm(), rtol=1e-4, atol=0)
    assert clipping.linf is not None
    for block, bound, cap in zip(blocks, clipping.l2, clipping.linf, strict=True):
        scale = (bound / block.norm(dim=1)).clamp(max=1.0)
        largest = (block.abs().amax(1) * scale).quantile(0.9)
        assert cap == pytest.approx(min(float(largest), bound), rel=1e-4)
    plain = fit()
    assert (plain.l2, plain.linf) == (clipping.l2, None)
    hush.Plan(sampling=hush.Poisson(0.1), clipping=clipping, noise=hush.Gaussian(1.0))


def test_records_without_a_residual_give_no_thresholds() -> None:
    model, (x, y), size = problem(40)
    same = x[:1].expand(40, -1), y[:1].expand(40)
    model.eval()
    with pytest.raises(DataError, match="nearly zero"):
        hush.public_thresholds(
            model, EACH, same, ranks=(4, size - 4), bases=Principal(groups=1), norm=1.0
        )
