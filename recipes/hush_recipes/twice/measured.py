"""Geometry of per-sample gradients: low-rank and sparse structure, entry sizes, and fitting clipping.

Section 3 of the twice-sampling paper. The principal directions and the order of the coordinates come
from one set of records, residuals are measured on another, and every record has norm 1.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hush.core.errors import DataError
from hush.gradients.precision import full_precision, vector_norms
from hush.report.text import Table
from hush.training.methods.public_bases import gradient_rows

Array = NDArray[np.float64]

_COLUMNS = 2**14
"""Coordinates that are in double precision at once."""
_SPARSITY_LEVELS = 40
_RELATIVE_RANK_TOLERANCE = 1e-12
"""Eigenvalues below this share of the largest, times their number, are rounding errors."""
_DESCENT_BATCH = 250
"""Records per pass without per-sample gradients."""
_LEVELS = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_WORTH = 1.1
"""Least reduction of the variance, as a factor, for which a split is recommended."""
_FEW, _MANY = 2, 100
"""Entries at the cap below which twice sampling gains nothing, and above which it gains no more.

A rule of thumb: `hush compare` computes the gain for a budget.
"""


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """Low-rank and sparse structure of records of norm 1."""

    dimension: int
    principal: Array
    """(records, k): a record's norm within the first k + 1 principal directions."""
    residual: Array
    """(records, k): the norm of the residual."""
    shares: Array
    """Shares of the coordinates that a sparse approximation keeps, the largest in the mean first."""
    dropped: Array
    """(shares,): the mean norm of its residual."""
    largest: Array
    """(records,): the largest entry."""
    variation: Array
    """(coordinates,): coefficient of variation, in rising order; infinite at mean zero."""

    @property
    def cap(self) -> float:
        """The bound on entries that clamps less than 1% of the records."""
        return float(np.quantile(self.largest, 0.99))

    @property
    def entries(self) -> float:
        """d0: how many entries at the cap make up norm 1."""
        return 1 / self.cap**2


@dataclass(frozen=True, kw_only=True)
class SubspaceSplit:
    """Two subspaces, the first principal directions and the rest, each clipped at its mean norm."""

    ranks: tuple[int, int]
    norms: tuple[float, float]
    """The mean norms in each: the clipping norms."""
    ratio: float
    """Variance of the best noise for the two over that for one l2 ball of the same norm."""
    kept: float
    """Mean norm of a record of norm 1 after clipping."""

    @property
    def gain(self) -> float:
        """Factor by which the variance falls, for records clipped to the same norm."""
        return self.kept**2 / self.ratio


def geometry(reference: Tensor, measured: Tensor) -> Geometry:
    """The geometry of the rows of `measured` in the principal directions of those of `reference`.

    Args:
        reference: (records, coordinates), scaled to norm 1 in place.
        measured: likewise, of other records.
    """
    for rows in (reference, measured):
        if rows.dim() != 2 or len(rows) == 0 or not bool(rows.isfinite().all()) or not bool(rows.any()):
            raise DataError(
                f"records of shape {tuple(rows.shape)} must be rows of finite numbers, not all zero."
            )
    if reference.shape[1] != measured.shape[1]:
        raise DataError(
            f"records of {reference.shape[1]} and of {measured.shape[1]} numbers lie in two spaces: all "
            "must have as many numbers."
        )
    with full_precision(measured.device):
        reference, measured = _unit(reference), _unit(measured)
        principal, residual = _low_rank(reference, measured)
        shares, dropped = _sparse(reference, measured)
        deviation, mean = torch.std_mean(measured, dim=0, correction=0)
        largest = vector_norms(measured, math.inf)
    return Geometry(
        dimension=measured.shape[1],
        principal=principal,
        residual=residual,
        shares=shares,
        dropped=dropped,
        largest=_numpy(largest.sort().values),
        variation=_numpy(
            (deviation / mean.abs()).nan_to_num(nan=math.inf, posinf=math.inf).sort().values
        ),
    )


def best_subspace_split(measured: Geometry) -> SubspaceSplit:
    """The split in two that needs the least noise for what it keeps (Theorem 4.6)."""
    return max(
        (split(measured, rank) for rank in _ranks(measured)), key=lambda candidate: candidate.gain
    )


def split(measured: Geometry, rank: int) -> SubspaceSplit:
    """The split into the first `rank` principal directions and the rest."""
    parts = np.stack([measured.principal[:, rank - 1], measured.residual[:, rank - 1]])
    norms = parts.mean(1)
    ranks = rank, measured.dimension - rank
    shaped = float(norms @ np.sqrt(ranks)) ** 2
    clipped = np.minimum(parts, norms[:, None])
    return SubspaceSplit(
        ranks=ranks,
        norms=(float(norms[0]), float(norms[1])),
        ratio=shaped / (measured.dimension * float(norms @ norms)),
        kept=float(np.linalg.norm(clipped, axis=0).mean()),
    )


def _ranks(measured: Geometry) -> range:
    return range(1, min(measured.principal.shape[1], measured.dimension - 1) + 1)


def _unit(rows: Tensor) -> Tensor:
    """The rows scaled to norm 1, in place; those of norm zero are left out."""
    norms = vector_norms(rows, 2.0)
    rows = rows if bool(norms.all()) else rows[norms > 0]
    return rows.div_(norms[norms > 0, None])


def _low_rank(reference: Tensor, measured: Tensor) -> tuple[Array, Array]:
    """Norms within and outside the first principal directions, from Gram matrices."""
    gram = torch.zeros(len(reference), len(reference), dtype=torch.float64, device=reference.device)
    cross = torch.zeros(len(measured), len(reference), dtype=torch.float64, device=reference.device)
    for reference_rows, rows in zip(
        reference.split(_COLUMNS, 1), measured.split(_COLUMNS, 1), strict=True
    ):
        gram.addmm_(reference_rows.double(), reference_rows.double().T)
        cross.addmm_(rows.double(), reference_rows.double().T)
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    nonzero = values > _RELATIVE_RANK_TOLERANCE * len(values) * values[0]
    inside = (cross @ vectors[:, nonzero] / values[nonzero].sqrt()).square().cumsum(1)
    outside = (_squared_norms(measured)[:, None] - inside).clamp(min=0)
    return _numpy(inside.sqrt()), _numpy(outside.sqrt())


def _sparse(reference: Tensor, measured: Tensor) -> tuple[Array, Array]:
    """Mean residual norms when a share of the coordinates is kept, the largest in the mean first."""
    order = reference.abs().mean(0).argsort(descending=True)
    ends = np.linspace(0, len(order), _SPARSITY_LEVELS + 1).round().astype(int)
    residual = _squared_norms(measured)
    dropped = [float(residual.sqrt().mean())]
    for start, end in pairwise(ends):
        residual = (residual - _squared_norms(measured[:, order[start:end]])).clamp(min=0)
        dropped.append(float(residual.sqrt().mean()))
    return ends / len(order), np.array(dropped)


def _squared_norms(rows: Tensor) -> Tensor:
    squares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for part in rows.split(_COLUMNS, 1):
        squares += part.double().square().sum(1)
    return squares


def _numpy(values: Tensor) -> Array:
    return values.to("cpu", torch.float64).numpy()


def probe(
    model: nn.Module,
    loss: nn.Module,
    reference: tuple[Tensor, Tensor],
    measured: tuple[Tensor, Tensor],
    *,
    steps: int,
    learning_rate: float,
    momentum: float = 0.9,
) -> Geometry:
    """Gradient geometry of `measured` beside `reference`, after training on `measured` without privacy.

    The result has no noise: both sets must be public.
    """
    descend(model, loss, measured, steps=steps, learning_rate=learning_rate, momentum=momentum)
    both = (gradient_rows(model, loss, part) for part in (reference, measured))
    return geometry(*(rows[rows.isfinite().all(1)] for rows in both))


def descend(
    model: nn.Module,
    loss: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    steps: int,
    learning_rate: float,
    momentum: float = 0.9,
) -> None:
    """Take full-batch gradient descent steps, without privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    inputs, targets = data
    for _ in range(steps):
        optimizer.zero_grad()
        for x, y in zip(inputs.split(_DESCENT_BATCH), targets.split(_DESCENT_BATCH), strict=True):
            (loss(model(x), y) * (len(x) / len(inputs))).backward()
        optimizer.step()
    optimizer.zero_grad()


def advice(geometry: Geometry) -> list[str]:
    """Recommended clipping, the reason, and the command that computes the gain for a budget."""
    best = best_subspace_split(geometry)
    (first, rest), (c1, c2) = best.ranks, best.norms
    worth = best.gain >= _WORTH
    subspaces = (
        f"subspaces {'pay' if worth else 'do not pay'}: {first} principal directions have norm "
        f"{c1:.3g}, the other {rest} have {c2:.3g}; shaped noise has {best.ratio:.3g} of the variance "
        f"of equal noise, and clipping at the means keeps {best.kept:.1%} of the norm: {best.gain:.3g} "
        "times less variance"
    )
    if worth:
        subspaces += (
            ". Shaped noise is larger along the principal directions, and in training runs it did worse "
            "than equal noise (docs/results/twice-sampling.md). Try both on public records"
        )
    if geometry.entries < _FEW:
        cap = (
            f"an l-infinity cap does not pay: 99% of the records need a cap of {geometry.cap:.3g}, and "
            f"d0 = {geometry.entries:.3g} entries are too few for coordinate sampling"
        )
    else:
        share = "part" if geometry.entries < 10 else "most" if geometry.entries < _MANY else "all"
        cap = (
            f"an l-infinity cap of {geometry.cap:.3g} leaves 99% of the records unchanged. With d0 = "
            f"{geometry.entries:.4g}, coordinate sampling has {share} of its possible gain"
        )
    command = (
        "the gain for a budget: hush compare --records N --batch-size B --steps T --epsilon E "
        f"--dimension {geometry.dimension} --linf-ratio {min(1.0, geometry.cap):.3g} "
        f"--subspaces {first}:{c1:.3g},{rest}:{c2:.3g}"
    )
    return [subspaces, cap, command]


def summary_table(geometry: Geometry) -> Table:
    """Residuals, principal norms and largest entries of the records at a few places."""
    ranks = [rank for rank in (1, 10, 30, 100, 300, 1000) if rank <= geometry.principal.shape[1]]
    finite = geometry.variation[np.isfinite(geometry.variation)]
    variation = np.quantile(finite, 0.5) if len(finite) else np.inf
    rows = [
        *(
            [f"norm within rank {rank}, outside", f"{inside.mean():.3f} ± {inside.std():.3f}, {out:.3f}"]
            for rank in ranks
            for inside, out in [(geometry.principal[:, rank - 1], geometry.residual[:, rank - 1].mean())]
        ),
        *(
            [f"residual with {share:.0%} of the coordinates kept", f"{value:.3f}"]
            for share, value in zip(geometry.shares[4::8], geometry.dropped[4::8], strict=True)
        ),
        *(
            [
                f"largest entry, {level:.0%} of the records below",
                f"{np.quantile(geometry.largest, level):.4f}",
            ]
            for level in _LEVELS
        ),
        ["coefficient of variation, median", f"{variation:.2f}"],
    ]
    return Table(header=["records of length 1", "measured"], rows=rows)
