"""Gradients of a matrix kept as the factors `sum_t left[t] (x) right[t]`, t the positions of a record.

With T positions and a matrix (m, n) the factors are T (m + n) numbers a record, against m n. The
weighted sum over records is one matrix product; the Euclidean norm comes from the inner products
between positions (the Gram matrices), other norms from writing out a few records at a time, except
where there is one position: the norm of an outer product is the product of the norms.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hush.core.tape import CoordinateMask
from hush.gradients.cancellation import (
    MANY,
    bounded,
    cancelling_apart,
    few_enough,
    nan_if_cancelled,
    norms_or_recompute,
    position_norms,
    product_bound,
)
from hush.gradients.terms import (
    Dense,
    Term,
    being_captured,
    blocked_product,
    clamp_rows,
    clamped_sum_of_rows,
    materialised_norms,
    precise,
    vector_norms,
    zero_rows,
)

FEWER = 2
"""Gradients are written out unless that takes more than this many times the numbers of the factors.

Up to there writing out is the faster way too: it costs the arithmetic of the plain gradient, T m n,
and then one pass each for the norms and the sum, while the Gram matrices take T^2 (m + n) on top of it.
Measured in docs/results/step.md.
"""

_ADDED = {"cpu": 2**17, "cuda": 2**28}
"""How many numbers of a table's rows are added up at once: on a CPU as many as stay in its cache."""


def product(left: Tensor, right: Tensor, shape: torch.Size) -> Term:
    """The term `sum_t left[:, t] (x) right[:, t]` in the cheaper form."""
    positions, rows, columns = left.shape[1], left.shape[2], right.shape[2]
    term = OuterFactors(left, right, shape)
    if positions == 1 or rows * columns > FEWER * positions * (rows + columns):
        return term
    return Dense(term.dense())


@dataclass(frozen=True, eq=False)
class OuterFactors:
    """`sum_t left[:, t] (x) right[:, t]`, as a matrix product leaves it."""

    left: Tensor
    right: Tensor
    shape: torch.Size

    @property
    def records(self) -> int:
        return len(self.left)

    def rounding_bounded(self, records: int) -> bool:
        return self.left.shape[1] == 1 or few_enough(self.left, records, self.left.shape[1])

    def take(self, rows: Tensor | slice) -> "OuterFactors":
        return OuterFactors(self.left[rows], self.right[rows], self.shape)

    def zeroed(self, keep: Tensor) -> "OuterFactors":
        return OuterFactors(zero_rows(self.left, keep), zero_rows(self.right, keep), self.shape)

    def dense(self) -> Tensor:
        return (precise(self.left).mT @ precise(self.right)).view(self.records, *self.shape)

    def norms(self, order: float) -> Tensor:
        kind, bound = precise(self.left).dtype, self.lengths()
        if self.left.shape[1] == 1:
            if order == 2:
                return nan_if_cancelled(bound.to(kind), bound)
            # in double precision: what underflows in one factor can be large in the other
            left, right = (vector_norms(part.double(), order) for part in (self.left, self.right))
            return nan_if_cancelled((left * right).to(kind), bound)
        if order != 2:
            return nan_if_cancelled(materialised_norms(self, order), bound)
        return euclidean(self, [self], bound)

    def weighted_sum(self, weights: Tensor, most: float = math.inf) -> Tensor:
        alone = self.left.shape[1] == 1
        return self.direct(weights) if alone else cancelling_apart(self, weights, most)

    def direct(self, weights: Tensor) -> Tensor:
        """The sum, position by position."""
        left = (precise(self.left) * weights.to(precise(self.left).dtype)[:, None, None]).flatten(0, 1)
        right = precise(self.right).flatten(0, 1)
        total = blocked_product(left, right) if self.left.shape[1] == 1 else (left.mT @ right).double()
        return total.view(self.shape)

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
    ) -> Tensor:
        """Written out are only records that may have a number beyond their limit."""
        if thin is not None or being_captured():
            return clamped_sum_of_rows(self, weights, limits, thin)
        tops = [precise(part).abs().amax(2) for part in (self.left, self.right)]
        beyond = (tops[0] * tops[1]).sum(1) > limits
        if not bool(beyond.any()):
            return self.direct(weights)
        inside = self.direct(weights.where(~beyond, 0.0))
        return inside + clamped_sum_of_rows(self.take(beyond), weights[beyond], limits[beyond], None)

    def lengths(self) -> Tensor:
        """A bound on each record's norm: the sum over positions of the norms."""
        left, right = (position_norms(part) for part in (self.left, self.right))
        return product_bound(left, right, precise(self.left).dtype)


@dataclass(frozen=True, eq=False)
class RowFactors:
    """`sum_t e[index[:, t]] (x) right[:, t]`, as a table of rows leaves it."""

    index: Tensor
    right: Tensor
    shape: torch.Size

    @property
    def records(self) -> int:
        return len(self.index)

    def rounding_bounded(self, records: int) -> bool:
        return records**2 * self.index.shape[1] <= MANY  # added in double precision

    def take(self, rows: Tensor | slice) -> "RowFactors":
        return RowFactors(self.index[rows], self.right[rows], self.shape)

    def zeroed(self, keep: Tensor) -> "RowFactors":
        return RowFactors(self.index, zero_rows(self.right, keep), self.shape)

    def dense(self) -> Tensor:
        rows = precise(self.right).flatten(0, 1)
        whole = rows.new_zeros(self.records * self.shape[0], self.shape[1])
        return whole.index_add_(0, self._keys(), rows).view(-1, *self.shape)

    def norms(self, order: float) -> Tensor:
        used, keys = self._used()
        record = keys // self.shape[0]
        each = vector_norms(used, order).double()
        norms = each.new_zeros(self.records).scatter_reduce_(0, record, each, "amax")
        if order != torch.inf:
            shares = each / norms.clamp(min=torch.finfo(torch.float64).tiny)[record]
            norms = norms * torch.zeros_like(norms).index_add_(0, record, shares**order) ** (1 / order)
        return bounded(norms.to(used.dtype), self.lengths())

    def weighted_sum(self, weights: Tensor, most: float = math.inf) -> Tensor:
        if being_captured():
            return self.clamped_weighted_sum(weights, torch.full_like(weights, math.inf), None)
        return cancelling_apart(self, weights, most)

    def direct(self, weights: Tensor) -> Tensor:
        """The sum, position by position."""
        total = torch.zeros(self.shape, dtype=torch.float64, device=weights.device)
        several = max(1, _ADDED[weights.device.type] // max(1, self.right.shape[1:].numel()))
        for start in range(0, self.records, several):
            some = slice(start, start + several)
            rows = self.right[some].double() * weights[some, None, None]
            total.index_add_(0, self.index[some].flatten(), rows.flatten(0, 1))
        return total

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
    ) -> Tensor:
        """Rows that a record did not use are zero, cut off or not, thinned or not."""
        used, keys = self._used()
        record = keys // self.shape[0]
        values = clamp_rows(used, limits[record], thin).double() * weights[record, None]
        return values.new_zeros(self.shape).index_add_(0, keys % self.shape[0], values)

    def lengths(self) -> Tensor:
        """A bound on each record's norm: the sum over positions of the norms."""
        return position_norms(self.right).sum(1)

    def _used(self) -> tuple[Tensor, Tensor]:
        """The rows of each record's table that it used, each once, and where they belong.

        They are filled from the front; what is left over is zero and may belong to any record.
        """
        keys, sources = self._keys().sort()
        place = (keys[1:] != keys[:-1]).long().cumsum(0)
        place = torch.cat([torch.zeros_like(keys[:1]), place])
        rows = precise(self.right).flatten(0, 1)
        # in the order of positions, so that a record's rows are the same numbers whoever else is there;
        # a GPU adds in any order
        wide = rows.double() if rows.is_cuda else rows
        places = torch.empty_like(place).index_copy_(0, sources, place)
        used = torch.zeros_like(wide).index_add_(0, places, wide).to(rows.dtype)
        return used, torch.zeros_like(keys).index_copy_(0, place, keys)

    def _keys(self) -> Tensor:
        start = torch.arange(self.records, device=self.index.device) * self.shape[0]
        return (self.index + start[:, None]).flatten()


@dataclass(frozen=True, eq=False)
class TiedFactors:
    """A table that is looked up and multiplied with, as a language model's first and last layer."""

    rows: RowFactors
    outer: OuterFactors

    @property
    def records(self) -> int:
        return self.rows.records

    @property
    def shape(self) -> torch.Size:
        return self.rows.shape

    def rounding_bounded(self, records: int) -> bool:
        # what is looked up and what is multiplied with may cancel, each too large on its own
        return few_enough(self.outer.left, records, self.outer.left.shape[1] + self.rows.index.shape[1])

    def take(self, rows: Tensor | slice) -> "TiedFactors":
        return TiedFactors(self.rows.take(rows), self.outer.take(rows))

    def zeroed(self, keep: Tensor) -> "TiedFactors":
        return TiedFactors(self.rows.zeroed(keep), self.outer.zeroed(keep))

    def dense(self) -> Tensor:
        return self.rows.dense() + self.outer.dense()

    def norms(self, order: float) -> Tensor:
        if order != 2:
            return nan_if_cancelled(materialised_norms(self, order), self.lengths())
        return euclidean(self, [self.rows, self.outer], self.lengths())

    def weighted_sum(self, weights: Tensor, most: float = math.inf) -> Tensor:
        return cancelling_apart(self, weights, most)

    def direct(self, weights: Tensor) -> Tensor:
        """The sum, position by position."""
        return self.rows.direct(weights) + self.outer.direct(weights)

    def lengths(self) -> Tensor:
        """A bound on each record's norm: the sum over positions of the norms."""
        return self.rows.lengths() + self.outer.lengths()

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
    ) -> Tensor:
        return clamped_sum_of_rows(self, weights, limits, thin)


def euclidean(term: Term, parts: Sequence[OuterFactors | RowFactors], bound: Tensor) -> Tensor:
    """The Euclidean norms of the sum of the parts from inner products between positions."""
    squares = torch.zeros_like(bound)
    for i, one in enumerate(parts):
        for other in parts[: i + 1]:
            right = one.right.double() @ other.right.double().mT
            inner = (_left_gram(one, other) * right).sum((1, 2))
            squares += inner if one is other else 2 * inner
    return norms_or_recompute(term, squares, bound, precise(parts[0].right).dtype)


def _left_gram(one: OuterFactors | RowFactors, other: OuterFactors | RowFactors) -> Tensor:
    """The inner products of the left factors: (records, positions, positions)."""
    if isinstance(one, OuterFactors) and isinstance(other, OuterFactors):
        return one.left.double() @ other.left.double().mT
    if isinstance(one, OuterFactors):
        assert isinstance(other, RowFactors)
        return one.left.double().gather(2, other.index[:, None].expand(-1, one.left.shape[1], -1))
    if isinstance(other, OuterFactors):
        return _left_gram(other, one).mT
    return (one.index[:, :, None] == other.index[:, None]).double()
