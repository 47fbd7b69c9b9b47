"""Principal subspaces of public gradients, by block power iteration with deflation.

Algorithm 4 of the twice-sampling paper, for each group of parameters on its own. All that enters is
public: the records, and weights that were released. So new bases cost nothing.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from hush.clipping.blocks import Principal
from hush.core.errors import DataError, InvalidValue
from hush.core.randomness import Randomness, seed_from
from hush.gradients.precision import full_precision
from hush.gradients.public_basis import Group, PublicBasis, webster_apportionment
from hush.gradients.tree import Loss
from hush.training.data import Data, count, own_randomness
from hush.training.methods.public_gradients import finite_rows, gradient_rows

_ROWS_AT_ONCE = 4096
"""Rows of a basis that are in double precision at a time."""


def principal_basis(
    model: nn.Module,
    loss: Loss,
    public: Data,
    ranks: Sequence[int],
    principal: Principal,
    generator: Randomness,
) -> PublicBasis:
    """Public basis: principal directions of the public records' gradients at the present weights.

    `ranks` are those of the subspaces, the residual's last; they add up to the number of parameters.
    Repeats itself for the same model and generator state. Only one group's public gradients are in
    memory at a time.
    """
    groups, columns = check_enough(model, public, ranks, principal)
    needed = max(map(sum, columns))
    seed = seed_from(generator)
    own = torch.Generator(next(model.parameters()).device).manual_seed(seed)
    parts = []
    for group, split in zip(groups, columns, strict=True):
        with own_randomness(own, own.device):
            rows = finite_rows(gradient_rows(model, loss, public, group))
        if len(rows) < sum(split):
            raise _too_few(len(rows), needed, len(groups))
        with full_precision(own.device):
            basis = principal_directions(rows, split, principal.iterations, own)
        parts.append(Group(group, basis, split))
    return PublicBasis(tuple(parts))


def check_enough(
    model: nn.Module, public: Data, ranks: Sequence[int], principal: Principal
) -> tuple[list[tuple[str, ...]], list[tuple[int, ...]]]:
    """The groups of parameters and the ranks in each; raise if the records are too few for them."""
    sizes = {name: value.numel() for name, value in model.named_parameters() if value.requires_grad}
    ranks = _checked(ranks, sum(sizes.values()))
    groups = _groups_of(list(sizes), list(sizes.values()), principal.groups)
    totals = [sum(sizes[name] for name in group) for group in groups]
    shares = [webster_apportionment(total, totals) for total in accumulate(ranks[:-1], initial=0)]
    needed = max(shares[-1])
    if count(public) < needed:
        raise _too_few(count(public), needed, len(groups))
    return groups, [tuple(b - a for a, b in pairwise(own)) for own in zip(*shares, strict=True)]


def principal_directions(
    rows: Tensor, ranks: Sequence[int], iterations: int, generator: torch.Generator
) -> Tensor:
    """Orthonormal basis of the rows' principal subspaces, a column a direction, the largest first.

    `rows` is overwritten by its residual.
    """
    length = rows.shape[1]
    basis = rows.new_zeros(length, 0)
    scale = float(rows.abs().max()) if rows.numel() else 0.0
    if 0 < scale < math.inf:
        rows /= scale  # products of very small or large numbers would leave the range
    for rank in ranks:
        block = torch.randn(length, rank, generator=generator, device=rows.device, dtype=rows.dtype)
        for _ in range(iterations):
            block = _orthonormal(rows.T @ (rows @ block), basis, generator)
        rows.addmm_(rows @ block, block.T, alpha=-1)
        basis = torch.cat([basis, block], 1)
    if 0 < scale < math.inf:
        rows *= scale
    identity = torch.eye(basis.shape[1], dtype=torch.float64, device=basis.device)
    if not bool(((_gram(basis) - identity).abs() < _NOT_ORTHONORMAL).all()):
        raise DataError(
            "no orthonormal basis was found for the public gradients: they are not finite, or lie in "
            "fewer directions than the ranks ask for. Check the public records, or lower the ranks."
        )
    return basis


# Random perturbation of each column, as a share of it, so that columns which depend on each other, or on
# the basis, have a Cholesky factor in double precision: the least that does.
_PERTURBATIONS = (1e-7, 1e-5)
_NOT_ORTHONORMAL = 1e-6


def _orthonormal(block: Tensor, basis: Tensor, generator: torch.Generator) -> Tensor:
    """Orthonormal columns that span the block's and are orthogonal to the basis.

    Random directions make up for what the block lacks in rank. By triangular factors of inner products
    in double precision: on a GPU a QR decomposition of such columns came out as no numbers.
    """
    perturbation = torch.randn(block.shape, generator=generator, device=block.device, dtype=block.dtype)
    unit = _normalized(block)
    for share in _PERTURBATIONS:
        block = unit + share / math.sqrt(len(block)) * perturbation
        for _ in range(3):  # a column that lies in the basis leaves its rounding, which does too
            block = _normalized(block - basis @ (basis.T @ block))
        factor, failed = torch.linalg.cholesky_ex(_gram(block))
        if not bool(failed):
            break
    block = _orthonormalized(block, factor)
    for _ in range(2):
        block = block - basis @ (basis.T @ block)
        block = _orthonormalized(block, torch.linalg.cholesky_ex(_gram(block)).L)
    return block


def _normalized(block: Tensor) -> Tensor:
    """Columns scaled to l2 norm 1."""
    length: Tensor = torch.linalg.vector_norm(block, dim=0)
    return block / length.clamp(min=torch.finfo(block.dtype).tiny)


def _orthonormalized(columns: Tensor, factor: Tensor) -> Tensor:
    """Columns times the inverse of the Cholesky factor of their Gram matrix."""
    return torch.cat(
        [
            torch.linalg.solve_triangular(factor.T, run.double(), upper=True, left=False).to(run.dtype)
            for run in columns.split(_ROWS_AT_ONCE)
        ]
    )


def _gram(columns: Tensor) -> Tensor:
    """Gram matrix of the columns, in double precision."""
    count = columns.shape[1]
    total = torch.zeros(count, count, dtype=torch.float64, device=columns.device)
    for run in columns.split(_ROWS_AT_ONCE):
        total.addmm_(run.T.double(), run.double())
    return total


def _groups_of(names: list[str], sizes: list[int], groups: int) -> list[tuple[str, ...]]:
    """Names in `groups` consecutive groups of about equal total size, or in fewer."""
    ends = list(accumulate(sizes, initial=0))
    middles = [(a + b) / 2 for a, b in pairwise(ends)]
    members: dict[int, list[str]] = {}
    for name, middle in zip(names, middles, strict=True):
        members.setdefault(min(groups - 1, int(groups * middle / max(1, ends[-1]))), []).append(name)
    return [tuple(run) for run in members.values()]


def _checked(ranks: Sequence[int], dimension: int) -> tuple[int, ...]:
    if len(ranks) < 2 or min(ranks) < 1 or sum(ranks) != dimension:
        raise InvalidValue(
            f"ranks={tuple(ranks)} must be those of the subspaces and, last, of the residual, each at "
            f"least 1, and add up to the {dimension} numbers that are trained: what is in no subspace "
            f"would not be released. Pass e.g. ranks=(1, {dimension - 1}).",
            key="ranks",
        )
    return tuple(ranks)


def _too_few(records: int, needed: int, groups: int) -> DataError:
    return DataError(
        f"{records} public records with finite gradients cannot span the {needed} directions that the "
        f"ranks ask for in the largest of {groups} groups of parameters. Pass at least {needed} public "
        "records, or lower the ranks, or split into more groups."
    )
