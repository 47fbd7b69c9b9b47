"""Per-sample gradients of a matrix as outer-product factors: `sum_t left[t] (x) right[t]`.

As ghost clipping keeps them: for a linear layer `left` is the output gradients and `right` the
activations, and t runs over the positions of a record (the tokens of a sequence). With T positions and a
matrix (m, n) the factors are T (m + n) numbers a record, against m n. The weighted sum over records is
one matrix product (book-keeping); the ghost norm comes from the Gram matrices of the positions, norms of
other orders from materialising a few records at a time, except where there is one position: the norm of
an outer product is the product of the norms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hush.core.tape import CoordinateMask
from hush.gradients.precision import blocked_product, capturing_cuda_graph, precise, vector_norms
from hush.gradients.terms import (
    POSITION_SUM_LIMIT,
    Dense,
    Term,
    clamp_rows,
    inf_if_overflowing,
    materialised_clamped_sum,
    materialised_norms,
    nan_if_cancelled,
    norms_or_recompute,
    position_norms,
    position_rounding_bounded,
    product_bound,
    sum_materialising_cancelled,
    zero_rows,
)

MATERIALISE_RATIO = 2
"""Gradients are materialised unless that takes more than this many times the memory of the factors.

Up to there materialising is faster too: it costs the arithmetic of the plain gradient, T m n, and then
one pass each for the norms and the sum, while the Gram matrices take T^2 (m + n) on top of it. Measured
in docs/results/step.md.
"""

_ROW_CHUNK = {"cpu": 2**17, "cuda": 2**28}
"""Entries of a table's rows that are summed at once: on a CPU as many as stay in its cache."""


def outer_product_term(left: Tensor, right: Tensor, shape: torch.Size) -> Term:
    """The term `sum_t left[:, t] (x) right[:, t]`, factored or materialised, whichever is cheaper.

    Args:
        left: (records, positions, rows).
        right: (records, positions, columns).
        shape: the parameter's shape, of rows x columns entries.
    """
    positions, rows, columns = left.shape[1], left.shape[2], right.shape[2]
    term = OuterFactors(left, right, shape)
    if positions == 1 or rows * columns > MATERIALISE_RATIO * positions * (rows + columns):
        return term
    return Dense(term.dense())


@dataclass(frozen=True, eq=False)
class OuterFactors:
    """`sum_t left[:, t] (x) right[:, t]`: per-sample gradients of a matrix product's weight."""

    left: Tensor
    right: Tensor
    shape: torch.Size

    @property
    def records(self) -> int:
        return len(self.left)

    def rounding_bounded(self, records: int) -> bool:
        positions = self.left.shape[1]
        return positions == 1 or position_rounding_bounded(self.left, records, positions)

    def take(self, rows: Tensor | slice) -> "OuterFactors":
        return OuterFactors(self.left[rows], self.right[rows], self.shape)

    def mask_records(self, keep: Tensor) -> "OuterFactors":
        return OuterFactors(zero_rows(self.left, keep), zero_rows(self.right, keep), self.shape)

    def dense(self) -> Tensor:
        return (precise(self.left).mT @ precise(self.right)).view(self.records, *self.shape)

    def norms(self, order: float) -> Tensor:
        dtype, bound = precise(self.left).dtype, self.norm_bounds()
        if self.left.shape[1] == 1:
            if order == 2:
                return nan_if_cancelled(bound.to(dtype), bound)
            # in double precision: what underflows in one factor can be large in the other
            left, right = (vector_norms(part.double(), order) for part in (self.left, self.right))
            return nan_if_cancelled((left * right).to(dtype), bound)
        if order != 2:
            return nan_if_cancelled(materialised_norms(self, order), bound)
        return ghost_norms(self, [self], bound)

    def weighted_sum(self, weights: Tensor, max_norm: float = math.inf) -> Tensor:
        if self.left.shape[1] == 1:
            return self.sum_over_positions(weights)
        return sum_materialising_cancelled(self, weights, max_norm)

    def sum_over_positions(self, weights: Tensor) -> Tensor:
        left = (precise(self.left) * weights.to(precise(self.left).dtype)[:, None, None]).flatten(0, 1)
        right = precise(self.right).flatten(0, 1)
        total = blocked_product(left, right) if self.left.shape[1] == 1 else (left.mT @ right).double()
        return total.view(self.shape)

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> Tensor:
        """Only records that may have an entry beyond their limit are materialised."""
        if mask is not None or capturing_cuda_graph():
            return materialised_clamped_sum(self, weights, limits, mask)
        left, right = (precise(part).abs().amax(2) for part in (self.left, self.right))
        beyond = (left * right).sum(1) > limits
        if not bool(beyond.any()):
            return self.sum_over_positions(weights)
        inside = self.sum_over_positions(weights.where(~beyond, 0.0))
        return inside + materialised_clamped_sum(
            self.take(beyond), weights[beyond], limits[beyond], None
        )

    def norm_bounds(self) -> Tensor:
        left, right = (position_norms(part) for part in (self.left, self.right))
        return product_bound(left, right, precise(self.left).dtype)


@dataclass(frozen=True, eq=False)
class RowFactors:
    """`sum_t e[index[:, t]] (x) right[:, t]`: per-sample gradients of an embedding table."""

    index: Tensor
    right: Tensor
    shape: torch.Size

    @property
    def records(self) -> int:
        return len(self.index)

    def rounding_bounded(self, records: int) -> bool:
        # summed in double precision
        return records**2 * self.index.shape[1] <= POSITION_SUM_LIMIT

    def take(self, rows: Tensor | slice) -> "RowFactors":
        return RowFactors(self.index[rows], self.right[rows], self.shape)

    def mask_records(self, keep: Tensor) -> "RowFactors":
        return RowFactors(self.index, zero_rows(self.right, keep), self.shape)

    def dense(self) -> Tensor:
        # positions may cancel: added up in double precision, as in the norms and in the sum
        rows = self.right.double().flatten(0, 1)
        whole = rows.new_zeros(self.records * self.shape[0], self.shape[1])
        whole.index_add_(0, self._keys(), rows)
        return whole.view(-1, *self.shape).to(precise(self.right).dtype)

    def norms(self, order: float) -> Tensor:
        used, keys = self._used_rows()
        record = keys // self.shape[0]
        row_norms = vector_norms(used, order).double()
        norms = row_norms.new_zeros(self.records).scatter_reduce_(0, record, row_norms, "amax")
        if order != torch.inf:
            shares = row_norms / norms.clamp(min=torch.finfo(torch.float64).tiny)[record]
            norms = norms * torch.zeros_like(norms).index_add_(0, record, shares**order) ** (1 / order)
        return inf_if_overflowing(norms.to(used.dtype), self.norm_bounds())

    def weighted_sum(self, weights: Tensor, max_norm: float = math.inf) -> Tensor:
        if capturing_cuda_graph():
            return self.clamped_weighted_sum(weights, torch.full_like(weights, math.inf), None)
        return sum_materialising_cancelled(self, weights, max_norm)

    def sum_over_positions(self, weights: Tensor) -> Tensor:
        total = torch.zeros(self.shape, dtype=torch.float64, device=weights.device)
        step = max(1, _ROW_CHUNK[weights.device.type] // max(1, self.right.shape[1:].numel()))
        for start in range(0, self.records, step):
            chunk = slice(start, start + step)
            rows = self.right[chunk].double() * weights[chunk, None, None]
            total.index_add_(0, self.index[chunk].flatten(), rows.flatten(0, 1))
        return total

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> Tensor:
        """Rows that a record did not use are zero, clamped or not, masked or not."""
        used, keys = self._used_rows()
        record = keys // self.shape[0]
        values = clamp_rows(used, limits[record], mask).double() * weights[record, None]
        return values.new_zeros(self.shape).index_add_(0, keys % self.shape[0], values)

    def norm_bounds(self) -> Tensor:
        return position_norms(self.right).sum(1)

    def _used_rows(self) -> tuple[Tensor, Tensor]:
        """The rows of its table that each record used, each once, and their keys, record * rows + row.

        They are filled from the front; the rest is zero and may have the key of any record.
        """
        keys, sources = self._keys().sort()
        place = (keys[1:] != keys[:-1]).long().cumsum(0)
        place = torch.cat([torch.zeros_like(keys[:1]), place])
        # in double precision, as the sum is: where positions cancel, a norm of sums in single precision
        # is another vector's. A GPU adds in any order, too.
        rows = self.right.double().flatten(0, 1)
        places = torch.empty_like(place).index_copy_(0, sources, place)
        used = torch.zeros_like(rows).index_add_(0, places, rows).to(precise(self.right).dtype)
        return used, torch.zeros_like(keys).index_copy_(0, place, keys)

    def _keys(self) -> Tensor:
        start = torch.arange(self.records, device=self.index.device) * self.shape[0]
        return (self.index + start[:, None]).flatten()


@dataclass(frozen=True, eq=False)
class TiedFactors:
    """Per-sample gradients of a tied embedding: a language model's first and last layer."""

    rows: RowFactors
    outer: OuterFactors

    @property
    def records(self) -> int:
        return self.rows.records

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    def rounding_bounded(self, records: int) -> bool:
        # the lookup's and the product's gradients may cancel, each too large on its own
        positions = self.outer.left.shape[1] + self.rows.index.shape[1]
        return position_rounding_bounded(self.outer.left, records, positions)

    def take(self, rows: Tensor | slice) -> "TiedFactors":
        return TiedFactors(self.rows.take(rows), self.outer.take(rows))

    def mask_records(self, keep: Tensor) -> "TiedFactors":
        return TiedFactors(self.rows.mask_records(keep), self.outer.mask_records(keep))

    def dense(self) -> Tensor:
        return self.rows.dense() + self.outer.dense()

    def norms(self, order: float) -> Tensor:
        if order != 2:
            return nan_if_cancelled(materialised_norms(self, order), self.norm_bounds())
        return ghost_norms(self, [self.rows, self.outer], self.norm_bounds())

    def weighted_sum(self, weights: Tensor, max_norm: float = math.inf) -> Tensor:
        return sum_materialising_cancelled(self, weights, max_norm)

    def sum_over_positions(self, weights: Tensor) -> Tensor:
        return self.rows.sum_over_positions(weights) + self.outer.sum_over_positions(weights)

    def norm_bounds(self) -> Tensor:
        return self.rows.norm_bounds() + self.outer.norm_bounds()

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> Tensor:
        return materialised_clamped_sum(self, weights, limits, mask)


def merge_terms(terms: Sequence[Term]) -> Term:
    """One term for all uses of a parameter: its norm is that of their sum."""
    if len(terms) == 1:
        return terms[0]
    outer = [term for term in terms if isinstance(term, OuterFactors)]
    rows = [term for term in terms if isinstance(term, RowFactors)]
    if len(outer) + len(rows) < len(terms):
        return Dense(sum((term.dense() for term in terms[1:]), start=terms[0].dense()))
    if not (outer and rows):
        return _merge_outer(outer) if outer else _merge_rows(rows)
    return TiedFactors(_merge_rows(rows), _merge_outer(outer))


def _merge_outer(terms: Sequence[OuterFactors]) -> OuterFactors:
    left, right = torch.cat([t.left for t in terms], 1), torch.cat([t.right for t in terms], 1)
    return OuterFactors(left, right, terms[0].shape)


def _merge_rows(terms: Sequence[RowFactors]) -> RowFactors:
    index, right = torch.cat([t.index for t in terms], 1), torch.cat([t.right for t in terms], 1)
    return RowFactors(index, right, terms[0].shape)


def ghost_norms(term: Term, parts: Sequence[OuterFactors | RowFactors], bound: Tensor) -> Tensor:
    """Ghost norms of the sum of the parts, from the Gram matrices of their positions."""
    squares = torch.zeros_like(bound)
    for i, one in enumerate(parts):
        for other in parts[: i + 1]:
            right = one.right.double() @ other.right.double().mT
            inner = (_left_gram(one, other) * right).sum((1, 2))
            squares += inner if one is other else 2 * inner
    return norms_or_recompute(term, squares, bound, precise(parts[0].right).dtype)


def _left_gram(one: OuterFactors | RowFactors, other: OuterFactors | RowFactors) -> Tensor:
    """Gram matrix of the left factors: (records, positions, positions)."""
    if isinstance(one, OuterFactors) and isinstance(other, OuterFactors):
        return one.left.double() @ other.left.double().mT
    if isinstance(one, OuterFactors):
        assert isinstance(other, RowFactors)
        return one.left.double().gather(2, other.index[:, None].expand(-1, one.left.shape[1], -1))
    if isinstance(other, OuterFactors):
        return _left_gram(other, one).mT
    return (one.index[:, :, None] == other.index[:, None]).double()
