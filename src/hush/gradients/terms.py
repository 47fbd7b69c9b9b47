"""Terms: the forms in which one parameter's per-sample gradients are kept, and what each can compute.

`Dense` is materialised gradients, as Opacus's `grad_sample`; the layers in `rules` have the factored
forms, which give ghost norms from Gram matrices and a weighted sum from one product (book-keeping: one
backward pass serves norms and sum).

Positions of a factored record can cancel: two large ones, `+B` and `-B`, have a small norm and a large
rounding error, in the record's norm and in the sum it is added to (docs/guarantees/tape.md, 5). Such a
ghost norm is not used, and the record is materialised before it is added.
"""

import math
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from hush.core.tape import CoordinateMask
from hush.gradients.precision import blocked_product, capturing_cuda_graph, precise, vector_norms

CHUNK_ENTRIES = {"cpu": 2**22, "cuda": 2**28}
"""Entries that a chunk of the tape holds unless one record has more: near the caches, or enough to keep
a GPU busy."""

MATERIALISE_CHUNK = {"cpu": 2**20, "cuda": 2**28}
"""Entries of a parameter's gradients that are materialised at once to be clamped and summed."""

_NORM_CHUNK = 2**22
"""Entries of factored gradients that are materialised at once to be measured."""

ROUNDING = 0.0024
"""How much more than its bound one record can move a weighted sum in single precision by rounding, as a
share of the bound, where a term says that its rounding is bounded: docs/guarantees/tape.md."""

_CANCELLED = 2.0**-10
"""Share of its upper bound below which a norm is of positions that mostly cancel each other.

Then rounding could be seen in its square, though Gram matrices are formed in double precision, and a
record whose norm is understated would not be clipped enough. Added up position by position with others,
such a record would also leave its rounding in their sum. It is materialised.
"""

POSITION_SUM_LIMIT = 2**28
"""Square of the records times their positions up to which sums in double precision round within 2**-15
of what a record may add: 2**-53 times this, times 2**10 for positions that cancel."""


class Term(Protocol):
    """One parameter's per-sample gradients, from all its uses in the model or from one of them."""

    @property
    def records(self) -> int: ...

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""

    def rounding_bounded(self, records: int) -> bool:
        """Whether rounding of `weighted_sum` over a number of records is at most `ROUNDING`."""

    def take(self, rows: Tensor | slice) -> Self:
        """The term of a subset of the records.

        Args:
            rows: indices, a mask or a slice.
        """

    def mask_records(self, keep: Tensor) -> Self:
        """The term with gradients of zero where `keep` is false; every record keeps its place."""

    def dense(self) -> Tensor:
        """The materialised per-sample gradients: (records, *shape)."""

    def of_units(self, count: int, scale: Tensor) -> "Term":
        """The term of units of privacy that own `count` consecutive records each.

        **Guarantee.** A unit's gradient as computed is a function of its own records and of shapes.

        Args:
            count: records a unit, two at least.
            scale: (records,), the factor of each record's gradient in its unit's sum.
        """

    def norms(self, order: float) -> Tensor:
        """The l_order norm of each record's gradient.

        Returns:
            (records,): never understated by more than `ROUNDING` allows; infinite or NaN where the
            gradient is, or may overflow on the way.
        """

    def weighted_sum(self, weights: Tensor, max_norm: float = math.inf) -> Tensor:
        """The sum over records of weight times gradient.

        Args:
            weights: (records,), not negative.
            max_norm: bound on every record's norm after weighting; it tells which records cancel.

        Returns:
            The sum in double precision, of the parameter's shape.
        """

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> Tensor:
        """The sum over records of weight times gradient, with entries clamped to +-limit, then masked.

        Args:
            weights: (records,), not negative.
            limits: (records,), the largest absolute entry of each record before weighting.
            mask: zeroes coordinates at random, for plans that sample them.

        Returns:
            The sum in double precision, of the parameter's shape.
        """


class FactoredTerm(Term, Protocol):
    """A term whose weighted sum can be computed from its positions, without materialising records."""

    def norm_bounds(self) -> Tensor:
        """An upper bound on each record's norm: the sum over positions of the norms."""

    def sum_over_positions(self, weights: Tensor) -> Tensor:
        """The weighted sum, position by position, whatever cancels."""


@dataclass(frozen=True, eq=False)
class Dense:
    """Materialised per-sample gradients."""

    gradients: Tensor

    @property
    def records(self) -> int:
        return len(self.gradients)

    @property
    def shape(self) -> torch.Size:
        return self.gradients.shape[1:]

    def rounding_bounded(self, records: int) -> bool:
        return True

    def take(self, rows: Tensor | slice) -> "Dense":
        return Dense(self.gradients[rows])

    def mask_records(self, keep: Tensor) -> "Dense":
        return Dense(zero_rows(self.gradients, keep))

    def dense(self) -> Tensor:
        return precise(self.gradients)

    def of_units(self, count: int, scale: Tensor) -> "Dense":
        return Dense(scale_rows(self.gradients, scale).unflatten(0, (-1, count)).sum(1))

    def norms(self, order: float) -> Tensor:
        return vector_norms(precise(self.gradients), order)

    def weighted_sum(self, weights: Tensor, max_norm: float = math.inf) -> Tensor:
        shape = self.gradients.shape[1:]
        rows = precise(self.gradients).reshape(len(self.gradients), math.prod(shape))
        return blocked_product(weights.to(rows.dtype)[:, None], rows).view(shape)

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> Tensor:
        return materialised_clamped_sum(self, weights, limits, mask)


def zero_rows(values: Tensor, keep: Tensor) -> Tensor:
    """The values with zeros in the rows that are not kept, which may not be finite."""
    return values.where(column(keep, values), torch.zeros_like(values[:1]))


def column(by_record: Tensor, values: Tensor) -> Tensor:
    """One number a record, of as many dimensions as its values have."""
    return by_record.view(-1, *[1] * (values.dim() - 1))


def scale_rows(values: Tensor, scale: Tensor) -> Tensor:
    """The values of each record, in single precision at least, times a number of its own."""
    wide = precise(values)
    return wide * column(scale.to(wide.dtype), wide)


def by_unit(positions: Tensor, count: int) -> Tensor:
    """Positions of the records of each unit one after another: (units, count * positions, ...)."""
    stacked: Tensor = positions.unflatten(0, (-1, count)).flatten(1, 2)
    return stacked


def materialised_norms(term: Term, order: float) -> Tensor:
    """The l_order norms of a term's materialised gradients, some records at a time."""
    step = max(1, _NORM_CHUNK // max(1, math.prod(term.shape)))
    starts = range(0, max(1, term.records), step)
    parts = [vector_norms(term.take(slice(start, start + step)).dense(), order) for start in starts]
    return torch.cat(parts)


def materialised_clamped_sum(
    term: Term, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
) -> Tensor:
    """`Term.clamped_weighted_sum` of materialised gradients, some records at a time."""
    size = math.prod(term.shape)
    step = max(1, MATERIALISE_CHUNK[weights.device.type] // max(1, size))
    total = torch.zeros(term.shape, dtype=torch.float64, device=weights.device)
    for start in range(0, term.records, step):
        rows = slice(start, start + step)
        gradients = term.take(rows).dense()
        values = clamp_rows(gradients.reshape(len(gradients), size), limits[rows], mask)
        # in double precision: which records are here may depend on one of them
        values.mul_(weights[rows].to(values.dtype)[:, None])
        total += values.sum(0, dtype=torch.float64).view(term.shape)
    return total


def clamp_rows(rows: Tensor, limits: Tensor, mask: CoordinateMask | None) -> Tensor:
    """The rows in new memory, the entries of each clamped to its limit, and then masked."""
    limit = limits.to(rows.dtype)[:, None]
    # twice as fast as clamp()
    values = torch.maximum(rows, -limit)
    torch.minimum(values, limit, out=values)
    return values if mask is None else mask(values)


def position_rounding_bounded(factor: Tensor, records: int, positions: int) -> bool:
    """Whether the sum over the positions of all records rounds within `ROUNDING`.

    They may cancel within a record, so that each is up to 2**10 times as long as what the record adds.
    """
    return factor.dtype == torch.float64 and records**2 * positions <= POSITION_SUM_LIMIT


def sum_materialising_cancelled(term: FactoredTerm, weights: Tensor, max_norm: float) -> Tensor:
    """The weighted sum over positions; records that mostly cancel are materialised.

    `max_norm` bounds every record's norm after weighting. (While a CUDA graph is captured such a
    record's norm is NaN instead.)
    """
    if max_norm == math.inf or capturing_cuda_graph():
        return term.sum_over_positions(weights)
    cancelled = _CANCELLED * weights * term.norm_bounds() > max_norm
    if not bool(cancelled.any()):
        return term.sum_over_positions(weights)
    own = weights[cancelled]
    unlimited = torch.full_like(own, math.inf)
    materialised = materialised_clamped_sum(term.take(cancelled), own, unlimited, None)
    return term.sum_over_positions(weights.where(~cancelled, 0.0)) + materialised


def product_bound(left: Tensor, right: Tensor) -> Tensor:
    """Upper bound on each record's norm: the products of the factors' norms, summed over positions.

    Infinite where a factor is beyond the root of the largest number: the other may be so small that a
    weight takes its last bits.

    Args:
        left: (records, positions, rows).
        right: (records, positions, columns).
    """
    factors = precise(left), precise(right)
    norms: list[Tensor] = [
        torch.linalg.vector_norm(part, dim=-1, dtype=torch.float64) for part in factors
    ]
    beyond = torch.maximum(*norms) > torch.finfo(factors[0].dtype).max ** 0.5
    return (norms[0] * norms[1]).sum(1).where(~beyond.any(1), torch.inf)


def nonfinite_if_unreliable(norms: Tensor, bound: Tensor, *, may_cancel: bool = True) -> Tensor:
    """The norms, infinite where positions or their partial sums may overflow their precision: where the
    bound exceeds 2^-6 of the largest number.

    NaN where most of a record cancels while a CUDA graph is captured: the batch is then computed without
    the graph.
    """
    norms = norms.where(bound <= torch.finfo(norms.dtype).max / 64, torch.inf)
    if may_cancel and capturing_cuda_graph():
        return norms.where(norms >= _CANCELLED * bound, torch.nan)
    return norms


def norms_or_recompute(term: Term, squares: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Ghost norms from their squares; records with cancelling positions are materialised instead."""
    cancelled = squares < (_CANCELLED * bound).square()
    norms = squares.clamp(min=0).sqrt().to(dtype)
    if not capturing_cuda_graph() and bool(cancelled.any()):
        norms[cancelled] = materialised_norms(term.take(cancelled), 2)
    return nonfinite_if_unreliable(norms, bound)
