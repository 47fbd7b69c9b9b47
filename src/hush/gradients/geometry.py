"""How vectors lie in space: what sparse or low-rank pictures leave over of them, and how large they are.

Section 3 of the twice-sampling paper. The directions and the order of the coordinates come from one set
of records, what they leave over is measured on another, and every record is scaled to length 1 first.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hush.core.errors import DataError
from hush.gradients.precision import full_precision
from hush.gradients.terms import vector_norms

Array = NDArray[np.float64]

_COLUMNS = 2**14
"""Coordinates that are in double precision at once."""
_SHARES = 40
_TINY = 1e-12
"""Eigenvalues below this share of the largest, times their number, are rounding errors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Geometry:
    """What was measured on records of length 1."""

    dimension: int
    principal: Array
    """(records, k): a record's norm within the first k + 1 principal directions."""
    residual: Array
    """(records, k): what those directions leave over."""
    shares: Array
    """Shares of the coordinates that are kept, the most significant first."""
    dropped: Array
    """(shares,): the mean norm of what is in the others."""
    largest: Array
    """(records,): the largest entry."""
    variation: Array
    """(coordinates,): the deviation over the mean's size, in rising order; infinite at mean zero."""

    @property
    def cap(self) -> float:
        """The bound on entries that clamps less than 1% of the records."""
        return float(np.quantile(self.largest, 0.99))

    @property
    def entries(self) -> float:
        """d0: how many entries at the cap make up the length."""
        return 1 / self.cap**2


@dataclass(frozen=True, kw_only=True)
class Split:
    """Two subspaces: the first principal directions, and the rest."""

    ranks: tuple[int, int]
    norms: tuple[float, float]
    """The mean norms in each: what to clip at."""
    ratio: float
    """The variance of the best noise for the two over that for one ball of the same norm."""
    kept: float
    """The mean norm of a record of length 1 after it is clipped so."""

    @property
    def gain(self) -> float:
        """How many times less variance, for records clipped to the same length."""
        return self.kept**2 / self.ratio


def geometry(reference: Tensor, measured: Tensor) -> Geometry:
    """The geometry of the rows of `measured` in the principal directions of those of `reference`.

    Both are scaled in place.
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
        principal, residual = _projected(reference, measured)
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


def best_split(found: Geometry) -> Split:
    """The split in two that needs the least noise for what it keeps (Theorem 4.6)."""
    return max((split(found, rank) for rank in _ranks(found)), key=lambda each: each.gain)


def split(found: Geometry, rank: int) -> Split:
    """The two subspaces of so many principal directions and the rest, clipped at their mean norms."""
    parts = np.stack([found.principal[:, rank - 1], found.residual[:, rank - 1]])
    norms = parts.mean(1)
    ranks = rank, found.dimension - rank
    shaped = float(norms @ np.sqrt(ranks)) ** 2
    clipped = np.minimum(parts, norms[:, None])
    return Split(
        ranks=ranks,
        norms=(float(norms[0]), float(norms[1])),
        ratio=shaped / (found.dimension * float(norms @ norms)),
        kept=float(np.linalg.norm(clipped, axis=0).mean()),
    )


def _ranks(found: Geometry) -> range:
    return range(1, min(found.principal.shape[1], found.dimension - 1) + 1)


def _unit(rows: Tensor) -> Tensor:
    """The rows scaled to length 1, in place; those of length zero are left out."""
    norms = vector_norms(rows, 2.0)
    rows = rows if bool(norms.all()) else rows[norms > 0]
    return rows.div_(norms[norms > 0, None])


def _projected(reference: Tensor, measured: Tensor) -> tuple[Array, Array]:
    """Norms within and outside the first principal directions, which are never written out."""
    gram = torch.zeros(len(reference), len(reference), dtype=torch.float64, device=reference.device)
    cross = torch.zeros(len(measured), len(reference), dtype=torch.float64, device=reference.device)
    for ours, theirs in zip(reference.split(_COLUMNS, 1), measured.split(_COLUMNS, 1), strict=True):
        gram.addmm_(ours.double(), ours.double().T)
        cross.addmm_(theirs.double(), ours.double().T)
    values, vectors = torch.linalg.eigh(gram)
    values, vectors = values.flip(0), vectors.flip(1)
    real = values > _TINY * len(values) * values[0]
    within = (cross @ vectors[:, real] / values[real].sqrt()).square().cumsum(1)
    outside = (_power(measured)[:, None] - within).clamp(min=0)
    return _numpy(within.sqrt()), _numpy(outside.sqrt())


def _sparse(reference: Tensor, measured: Tensor) -> tuple[Array, Array]:
    """What is left over when only a share of the coordinates is kept, by their mean size."""
    order = reference.abs().mean(0).argsort(descending=True)
    ends = np.linspace(0, len(order), _SHARES + 1).round().astype(int)
    left = _power(measured)
    dropped = [float(left.sqrt().mean())]
    for start, end in pairwise(ends):
        left = (left - _power(measured[:, order[start:end]])).clamp(min=0)
        dropped.append(float(left.sqrt().mean()))
    return ends / len(order), np.array(dropped)


def _power(rows: Tensor) -> Tensor:
    """The sum of each row's squares."""
    power = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    for part in rows.split(_COLUMNS, 1):
        power += part.double().square().sum(1)
    return power


def _numpy(values: Tensor) -> Array:
    return values.to("cpu", torch.float64).numpy()
