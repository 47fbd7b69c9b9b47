"""Coefficients against a basis materialised as one matrix, one record at a time, in double precision."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from hush.core.parts import SensitivitySet
from hush.gradients.public_basis import Group, ProjectedTape, PublicBasis
from hush.gradients.recording import record
from hush.gradients.tape import GradientTape
from hush.gradients.terms import Dense
from tests.gradients.oracle import one_at_a_time

LOSS = nn.CrossEntropyLoss(reduction="none")
COLUMNS = ((2, 3), (0, 4))


def problem(dtype: torch.dtype) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    return model, torch.randn(7, 5, dtype=dtype), torch.randint(0, 3, (7,))


def basis_for(model: nn.Module, columns: Sequence[tuple[int, ...]] = COLUMNS) -> PublicBasis:
    names = [name for name, _ in model.named_parameters()]
    groups = []
    for own, split in zip((names[:1], names[1:]), columns, strict=True):
        parameters = [model.get_parameter(name) for name in own]
        size = sum(parameter.numel() for parameter in parameters)
        random = torch.randn(size, sum(split), dtype=parameters[0].dtype)
        groups.append(Group(tuple(own), torch.linalg.qr(random)[0], split))
    return PublicBasis(tuple(groups))


def materialised(basis: PublicBasis) -> dict[str, Tensor]:
    """Each subspace's directions as columns over all parameters, in double precision."""
    blocks = {}
    for j in range(len(basis.groups[0].columns)):
        parts = [group.basis.double().split(group.columns, 1)[j] for group in basis.groups]
        blocks[f"subspace {j}"] = torch.block_diag(*parts)
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("entries", [1, 200, None])
def test_blocks_are_projections_of_each_record_alone(dtype: torch.dtype, entries: int | None) -> None:
    model, x, y = problem(dtype)
    basis = basis_for(model)
    gradients = one_at_a_time(model, LOSS, x, y, len(x)).double()
    directions = materialised(basis)
    whole = torch.cat(list(directions.values()), 1)
    expected = {name: gradients @ columns for name, columns in directions.items()}
    expected["residual"] = gradients - gradients @ whole @ whole.T
    tape = ProjectedTape(record(model, LOSS, x, y), basis)
    assert basis.sizes == {"subspace 0": 2, "subspace 1": 7, "residual": gradients.shape[1]}
    visits = torch.zeros(len(x))
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    for rows, blocks in tape.chunks(entries):
        visits[rows] += 1
        assert list(blocks) == list(basis.sizes)
        for name, block in blocks.items():
            torch.testing.assert_close(block.double(), expected[name][rows], atol=tolerance, rtol=1e-5)
    assert visits.tolist() == [1] * len(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_restoring_undoes_the_frame_and_drops_noise_within_the_subspaces(dtype: torch.dtype) -> None:
    model, x, y = problem(dtype)
    basis = basis_for(model)
    whole = torch.cat(list(materialised(basis).values()), 1)
    noisy = torch.randn(sum(basis.sizes.values()), dtype=dtype)
    *parts, residual = noisy.double().split(list(basis.sizes.values()))
    outside = torch.eye(len(whole), dtype=torch.float64) - whole @ whole.T
    expected = whole @ torch.cat(parts) + outside @ residual
    restored = basis.to_parameters(noisy)
    assert restored.dtype == dtype
    torch.testing.assert_close(restored.double(), expected, atol=1e-5, rtol=1e-5)
    gradients = one_at_a_time(model, LOSS, x, y, len(x)).sum(0)
    total = sum(
        torch.cat([block.sum(0) for block in blocks.values()])
        for _, blocks in ProjectedTape(record(model, LOSS, x, y), basis).chunks()
    )
    torch.testing.assert_close(basis.to_parameters(torch.as_tensor(total)), gradients)


def test_the_noise_of_the_residual_has_only_the_dimensions_that_are_left() -> None:
    model, _, _ = problem(torch.float64)
    basis = basis_for(model)
    noise = torch.zeros(5_000, sum(basis.sizes.values()), dtype=torch.float64)
    noise[:, -basis.dimension :] = torch.randn(5_000, basis.dimension, dtype=torch.float64)
    power = (
        torch.stack([basis.to_parameters(coefficients) for coefficients in noise]).square().sum(1).mean()
    )
    residual_dimension = basis.dimension - sum(map(sum, COLUMNS))
    assert float(power) == pytest.approx(
        residual_dimension, rel=5 * math.sqrt(2 / residual_dimension / 5_000)
    )
    assert abs(residual_dimension - basis.dimension) > 1  # or nothing would be shown


def test_a_crooked_basis_still_says_what_it_releases() -> None:
    # Privacy rests on the blocks as they are handed out, not on the basis being orthonormal.
    model, x, y = problem(torch.float64)
    straight = basis_for(model)
    crooked = PublicBasis(tuple(Group(g.names, 3 * g.basis + 0.1, g.columns) for g in straight.groups))
    gradients = one_at_a_time(model, LOSS, x, y, len(x))
    for _, blocks in ProjectedTape(record(model, LOSS, x, y), crooked).chunks():
        for name, directions in materialised(crooked).items():
            torch.testing.assert_close(blocks[name], gradients @ directions)


def test_one_record_that_is_not_finite_spoils_only_itself() -> None:
    model, x, y = problem(torch.float32)
    x[3] = torch.inf
    for _, blocks in ProjectedTape(record(model, LOSS, x, y), basis_for(model)).chunks():
        for block in blocks.values():
            finite = block.isfinite().all(1)
            assert finite.tolist() == [k != 3 for k in range(7)]


def test_a_coefficient_that_overflows_adds_nothing_and_no_nan() -> None:
    """A gradient of finite norm along a direction a little longer than 1 has an infinite coefficient."""
    largest = torch.finfo(torch.float32).max
    overflowed = 0
    for seed in range(20):
        torch.manual_seed(seed)
        direction = torch.linalg.qr(torch.randn(6, 1))[0]
        unit = direction[:, 0].double() / direction[:, 0].double().norm()
        rows = torch.stack([(unit * largest * (1 - 1e-9)).float(), torch.randn(6)])
        tape = GradientTape({"w": Dense(rows)}, torch.device("cpu"))
        assert bool(tape.norms(2.0).isfinite().all())
        basis = PublicBasis((Group(("w",), direction, (1,)),))
        overflowed += not bool((rows @ direction).isfinite().all())
        sets = [SensitivitySet(p=2.0, norm=1.0, dimension=size) for size in (1, 6)]
        clipped = ProjectedTape(tape, basis).clip_entrywise(sets)
        assert all(bool(part.isfinite().all()) for part in clipped.total.values())
        alone = ProjectedTape(GradientTape({"w": Dense(rows[1:])}, torch.device("cpu")), basis)
        for moved, part in zip(
            clipped.total.values(), alone.clip_entrywise(sets).total.values(), strict=True
        ):
            assert float((moved - part).norm()) <= 1.0024
    assert overflowed, "the case is met"
