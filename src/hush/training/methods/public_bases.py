"""Bases and thresholds for clipping, computed from public records and released weights.

They have no privacy cost. The basis of each parameter group consists of principal subspaces, computed by
block power iteration with deflation (Algorithm 4 of the twice-sampling paper).
"""

import functools
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hush.clipping import Subspaces
from hush.clipping.blocks import Principal
from hush.clipping.norms import NORM
from hush.core.errors import DataError, InvalidValue
from hush.core.parts import Clipping
from hush.core.randomness import RandomSource, seed_from
from hush.core.value import Range
from hush.gradients.losses import per_sample_loss
from hush.gradients.models import trainable
from hush.gradients.precision import full_precision, vector_norms
from hush.gradients.public_basis import Group, ProjectedTape, PublicBasis, webster_apportionment
from hush.gradients.recording import NotVectorized, record
from hush.gradients.tape import GradientTape
from hush.gradients.tree import Loss, tree_map
from hush.training.data import Data, count, own_randomness, take

_ROWS_AT_ONCE = 4096  # number of rows of a basis converted to double precision at a time
_GRADIENTS_AT_ONCE = {"cpu": 64, "cuda": 256}
"""Number of records per pass with per-sample gradients; a GPU needs larger batches."""
_PERTURBATIONS = (1e-7, 1e-5)
"""Relative random perturbations of columns, increased until the Cholesky factorisation succeeds."""
_TINY = float(torch.finfo(torch.float32).tiny)
_QUANTILE = Range(above=0, below=1, why="it is a share of the records", example=0.99)
_FOR_BASES = 0.6  # fraction of the public records for the basis of `public_thresholds`


class BasisSchedule:
    """Public basis of each step, recomputed every `every` steps."""

    def __init__(self, model: nn.Module, loss: Loss, public: Data, clipping: Subspaces) -> None:
        self.public = public
        self._model, self._loss, self._clipping = model, loss, clipping
        self.current: PublicBasis | None = None
        self._inputs: dict[str, Any] = {}

    def at(self, step: int, generator: RandomSource) -> PublicBasis:
        """Public basis of a step (counted from 0); a new basis draws its seed from the generator."""
        assert self._clipping.bases is not None
        due = step % self._clipping.bases.every == 0 and step != self._inputs.get("step")
        if self.current is None or due:
            self._inputs = {"step": step, "seed": seed_from(generator), "weights": self._weights()}
            self.current = self._compute()
        return self.current

    def state_dict(self) -> dict[str, Any]:
        """Step, seed and weights from which the current basis was computed."""
        return self._inputs

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Recompute the basis from the stored weights and seed."""
        self._inputs, self.current = state, None
        if not state:
            return
        before, parameters = self._weights(), dict(self._model.named_parameters())
        try:
            for name, value in parameters.items():
                value.copy_(state["weights"][name])
            self.current = self._compute()
        finally:
            for name, value in parameters.items():
                value.copy_(before[name])

    def _weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self._model.named_parameters()}

    def _compute(self) -> PublicBasis:
        device = next(self._model.parameters()).device
        own = torch.Generator(device).manual_seed(self._inputs["seed"])
        ranks, principal = self._clipping.ranks, self._clipping.bases
        assert principal is not None
        return principal_basis(self._model, self._loss, self.public, ranks, principal, own)


def public_thresholds(
    model: nn.Module,
    loss: Loss,
    public: Data,
    *,
    ranks: Sequence[int],
    norm: float,
    bases: Principal,
    entries: bool = False,
    quantile: float = 0.99,
) -> Subspaces:
    """Clipping in principal subspaces, with thresholds from the gradients of public records.

    The first 60% of the public records determine a basis. The thresholds are proportional to the mean
    norms of the other public gradients in the blocks of this basis (docs/guarantees/public-basis.md, 4).

    Args:
        model: Model with the initial weights of training.
        loss: Loss of a record.
        public: Inputs and targets of public records, which are not in the private set.
        ranks: Ranks of the subspaces and, last, of the complement. Their sum is the number of
            parameters.
        norm: Euclidean norm of the vector of thresholds.
        bases: Options of the principal directions.
        entries: Whether to also bound each coefficient.
        quantile: Bound on a coefficient, as a quantile of the largest coefficients of the public
            records.
    """
    norm = NORM["range"].check("norm", norm)
    quantile = _QUANTILE.check("quantile", quantile)
    slots = torch.arange(count(public)).tensor_split([int(_FOR_BASES * count(public))])
    for_basis, measured = (take(public, rows) for rows in slots)
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    basis = principal_basis(model, loss, for_basis, ranks, bases, generator)
    l2, linf = _block_norms(model, loss, measured, basis)
    tiny = torch.finfo(torch.float64).tiny
    expected = l2.sum(0) / max(1, len(l2))
    bounds = norm * expected / expected.norm().clamp(min=tiny)
    if not bool((bounds >= 1e-6 * norm).all()):
        listed = ", ".join(f"{value:.3g}" for value in expected.tolist())
        raise DataError(
            f"the public gradients have mean norms of {listed} in the blocks: clipping a block to a "
            "norm that is nearly zero would remove it from every private gradient. Pass more public "
            "records, or reduce the ranks."
        )
    clipped = linf * (bounds / l2.clamp(min=tiny)).clamp(max=1)
    largest = clipped.quantile(quantile, dim=0).clamp(min=1e-12).minimum(bounds)
    caps = tuple(largest.tolist()) if entries else None
    return Subspaces(ranks=ranks, l2=tuple(bounds.tolist()), linf=caps, bases=bases)


def _block_norms(model: nn.Module, loss: Loss, data: Data, basis: PublicBasis) -> tuple[Tensor, Tensor]:
    """l2 and linf norms of the finite per-sample gradients by block, each of shape (records, blocks)."""
    norms = []
    for tape in tapes(model, loss, data):
        by_block = torch.empty(2, tape.records, len(basis.sizes), device=tape.device)
        for rows, blocks in ProjectedTape(tape, basis).chunks():
            for order, part in zip((2.0, torch.inf), by_block, strict=True):
                columns = [vector_norms(block, order) for block in blocks.values()]
                part[rows] = torch.stack(columns, 1).float()
        norms.append(by_block)
    found = torch.cat(norms, 1).to("cpu", torch.float64)
    l2, linf = found[:, found.isfinite().all(2).all(0)]
    return l2, linf


def basis_schedule(
    model: nn.Module, loss: Loss, public: Data | None, clipping: Clipping
) -> BasisSchedule | None:
    """Schedule of the public bases for a clipping rule, or None if it needs no basis."""
    if not isinstance(clipping, Subspaces) or clipping.bases is None:
        if public is not None:
            raise DataError(
                "the clipping does not use public=. Clip with Subspaces(..., bases=Principal()), or "
                "leave public= out."
            )
        return None
    if public is None:
        raise DataError(
            "the clipping needs public gradients, but public=None. Pass public=(inputs, targets) with "
            "records that need no protection and are not in the private set (hush train: "
            "--public-records N)."
        )
    _split_into_groups(model, public, clipping.ranks, clipping.bases)
    return BasisSchedule(model, loss, public, clipping)


def principal_basis(
    model: nn.Module,
    loss: Loss,
    public: Data,
    ranks: Sequence[int],
    principal: Principal,
    generator: RandomSource,
) -> PublicBasis:
    """Principal directions of the public records' gradients at the current weights.

    `ranks` contains the ranks of the subspaces and, last, of the complement. Their sum is the number of
    parameters. Memory contains the gradients of one parameter group at a time.
    """
    groups, columns = _split_into_groups(model, public, ranks, principal)
    own = torch.Generator(next(model.parameters()).device).manual_seed(seed_from(generator))
    parts = []
    for group, split in zip(groups, columns, strict=True):
        with own_randomness(own, own.device):
            rows = gradient_rows(model, loss, public, group)
            usable = rows.isfinite().all(1)
            rows = rows if bool(usable.all()) else rows[usable]  # a copy would double the memory
        if len(rows) < sum(split):
            raise _too_few(len(rows), max(map(sum, columns)), len(groups))
        with full_precision(own.device):
            basis = principal_directions(rows, split, principal.iterations, own)
        parts.append(Group(group, basis, split))
    return PublicBasis(tuple(parts))


def _split_into_groups(
    model: nn.Module, public: Data, ranks: Sequence[int], principal: Principal
) -> tuple[list[tuple[str, ...]], list[tuple[int, ...]]]:
    """Parameter groups and their ranks; raise if there are too few public records."""
    sizes = {name: value.numel() for name, value in trainable(model).items()}
    dimension = sum(sizes.values())
    if len(ranks) < 2 or min(ranks) < 1 or sum(ranks) != dimension:
        raise InvalidValue(
            f"ranks={tuple(ranks)} must be the ranks of the subspaces and, last, of the complement, "
            f"each at least 1, with sum {dimension}, the number of parameters. Pass e.g. ranks=(1, "
            f"{dimension - 1}).",
            key="ranks",
        )
    # consecutive groups of about equal size
    ends = list(accumulate(sizes.values(), initial=0))
    members: dict[int, list[str]] = {}
    for name, (start, end) in zip(sizes, pairwise(ends), strict=True):
        place = int(principal.groups * ((start + end) / 2) / max(1, dimension))
        members.setdefault(min(principal.groups - 1, place), []).append(name)
    groups = [tuple(run) for run in members.values()]
    totals = [sum(sizes[name] for name in group) for group in groups]
    shares = [webster_apportionment(total, totals) for total in accumulate(ranks[:-1], initial=0)]
    needed = max(shares[-1])
    if count(public) < needed:
        raise _too_few(count(public), needed, len(groups))
    return groups, [tuple(b - a for a, b in pairwise(own)) for own in zip(*shares, strict=True)]


def principal_directions(
    rows: Tensor, ranks: Sequence[int], iterations: int, generator: torch.Generator
) -> Tensor:
    """Orthonormal basis of the principal subspaces of the rows; the residual overwrites `rows`."""
    length = rows.shape[1]
    basis = rows.new_zeros(length, 0)
    scale = float(rows.abs().max()) if rows.numel() else 0.0
    if 0 < scale < math.inf:
        rows /= scale  # prevent underflow and overflow of products
    for rank in ranks:
        block = torch.randn(length, rank, generator=generator, device=rows.device, dtype=rows.dtype)
        for _ in range(iterations):
            block = _orthonormal(rows.T @ (rows @ block), basis, generator)
        rows.addmm_(rows @ block, block.T, alpha=-1)
        basis = torch.cat([basis, block], 1)
    if 0 < scale < math.inf:
        rows *= scale
    identity = torch.eye(basis.shape[1], dtype=torch.float64, device=basis.device)
    if not bool(((_gram(basis) - identity).abs() < 1e-6).all()):
        raise DataError(
            "no orthonormal basis was found: the public gradients are not finite, or their rank is "
            "lower than requested. Check the public records, or reduce the ranks."
        )
    return basis


def _orthonormal(block: Tensor, basis: Tensor, generator: torch.Generator) -> Tensor:
    """Orthonormalise the columns of a block, orthogonally to the basis.

    Random directions complete a block of lower rank. The columns are orthonormalised with Cholesky
    factors in double precision, because QR decompositions on a GPU returned NaN for such columns.
    """
    normalize = functools.partial(nn.functional.normalize, dim=0, eps=_TINY)
    perturbation = torch.randn(block.shape, generator=generator, device=block.device, dtype=block.dtype)
    unit = normalize(block)
    for share in _PERTURBATIONS:
        block = unit + share / math.sqrt(len(block)) * perturbation
        for _ in range(
            3
        ):  # repeat, because the projection of a column in the span of the basis is rounding error
            block = normalize(block - basis @ (basis.T @ block))
        factor, failed = torch.linalg.cholesky_ex(_gram(block))
        if not bool(failed):
            break
    block = _orthonormalized(block, factor)
    for _ in range(2):
        block = block - basis @ (basis.T @ block)
        block = _orthonormalized(block, torch.linalg.cholesky_ex(_gram(block)).L)
    return block


def _orthonormalized(columns: Tensor, factor: Tensor) -> Tensor:
    """Columns times the inverse of the Cholesky factor of their Gram matrix."""
    solve = functools.partial(torch.linalg.solve_triangular, factor.T, upper=True, left=False)
    return torch.cat([solve(run.double()).to(run.dtype) for run in columns.split(_ROWS_AT_ONCE)])


def _gram(columns: Tensor) -> Tensor:
    """Gram matrix of the columns, in double precision."""
    count = columns.shape[1]
    total = torch.zeros(count, count, dtype=torch.float64, device=columns.device)
    for run in columns.split(_ROWS_AT_ONCE):
        total.addmm_(run.T.double(), run.double())
    return total


def _too_few(records: int, needed: int, groups: int) -> DataError:
    return DataError(
        f"{records} public records with finite gradients cannot span the {needed} directions of the "
        f"largest of {groups} parameter groups. Pass at least {needed} public records, reduce the "
        "ranks, or use more groups."
    )


def gradient_rows(
    model: nn.Module, loss: Loss, data: Data, names: Sequence[str] | None = None
) -> Tensor:
    """Per-sample gradients of the named (or all) parameters, one row per record (sensitive)."""
    trained = trainable(model)
    names = list(trained) if names is None else names
    dtype = functools.reduce(torch.promote_types, (v.dtype for v in trained.values()), torch.float32)
    sizes = [trained[name].numel() for name in names]
    device = next(iter(trained.values())).device
    rows = torch.empty(count(data), sum(sizes), dtype=dtype, device=device)
    at_once = _GRADIENTS_AT_ONCE[device.type]
    for batch, tape in zip(rows.split(at_once), tapes(model, loss, data), strict=True):
        for chunk, gradients in tape.select(list(names)).chunks():
            for part, columns in zip(gradients.values(), batch.split(sizes, 1), strict=True):
                columns[chunk] = part.unsqueeze(-1).flatten(1).to(dtype)
    return rows


def tapes(model: nn.Module, loss: Loss, data: Data) -> Iterator[GradientTape]:
    """Gradient tapes of consecutive chunks of records."""
    device = next(model.parameters()).device
    for indices in torch.arange(count(data)).split(_GRADIENTS_AT_ONCE[device.type]):
        inputs, targets = tree_map(take(data, indices), lambda value: value.to(device))
        recorded = functools.partial(record, model, per_sample_loss(loss), inputs, targets)
        try:
            tape = recorded()
        except NotVectorized:
            tape = recorded(one_by_one=True)
        yield tape
