"""Embeddings: rows of a table looked up by index, and tables that are also a product's weight.

The per-sample gradient of a table is kept as the indices and the gradients of the rows looked up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hush.core.errors import Unsupported
from hush.core.tape import CoordinateMask
from hush.gradients.precision import capturing_cuda_graph, precise, vector_norms
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.terms import (
    POSITION_SUM_LIMIT,
    Dense,
    Term,
    by_unit,
    clamp_rows,
    materialised_clamped_sum,
    materialised_norms,
    nonfinite_if_unreliable,
    norms_or_recompute,
    position_rounding_bounded,
    scale_rows,
    sum_materialising_cancelled,
    zero_rows,
)

if TYPE_CHECKING:
    from hush.gradients.recording import Recording
    from hush.gradients.rules import Weight

_ROW_CHUNK = {"cpu": 2**17, "cuda": 2**28}
"""Entries of a table's rows that are summed at once: on a CPU as many as stay in its cache."""


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

    def of_units(self, count: int, scale: Tensor) -> "RowFactors":
        right = by_unit(scale_rows(self.right, scale), count)
        return RowFactors(by_unit(self.index, count), right, self.shape)

    def norms(self, order: float) -> Tensor:
        used, keys = self._used_rows()
        record = keys // self.shape[0]
        row_norms = vector_norms(used, order).double()
        norms = row_norms.new_zeros(self.records).scatter_reduce_(0, record, row_norms, "amax")
        if order != torch.inf:
            shares = row_norms / norms.clamp(min=torch.finfo(torch.float64).tiny)[record]
            norms = norms * torch.zeros_like(norms).index_add_(0, record, shares**order) ** (1 / order)
        return nonfinite_if_unreliable(norms.to(used.dtype), self.norm_bounds(), may_cancel=False)

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
        norms: Tensor = torch.linalg.vector_norm(precise(self.right), dim=-1, dtype=torch.float64)
        return norms.sum(1)

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

    def of_units(self, count: int, scale: Tensor) -> Term:
        return merge_terms([self.rows.of_units(count, scale), self.outer.of_units(count, scale)])

    def norms(self, order: float) -> Tensor:
        bound = self.norm_bounds()
        if order != 2:
            return nonfinite_if_unreliable(materialised_norms(self, order), bound)
        # Gram matrices of the positions: of the lookup, of both, and of the product
        index, rows = self.rows.index, self.rows.right.double()
        squares = ((index[:, :, None] == index[:, None]) * (rows @ rows.mT)).sum((1, 2))
        left, right = self.outer.left.double(), self.outer.right.double()
        left_at_index = left.gather(2, index[:, None].expand(-1, left.shape[1], -1))
        squares += 2 * (left_at_index * (right @ rows.mT)).sum((1, 2))
        squares += self.outer.squared_norms()
        return norms_or_recompute(self, squares, bound, precise(self.rows.right).dtype)

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
    """One term for all uses of a parameter, the sum of theirs."""
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


@dataclass(frozen=True, eq=False)
class Lookup:
    """The rows of a table at each record's indices; the padding row is never trained."""

    weight: "Weight"
    padding: int | None

    def forward(self, index: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return functional.embedding(index, self.weight.value), (index,)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        index = saved[0].flatten(1) if saved[0].dim() > 1 else saved[0].unsqueeze(1)
        right = grad.reshape(*index.shape, grad.shape[-1])
        if self.padding is not None:
            right = right.masked_fill((index == self.padding).unsqueeze(-1), 0)
        assert self.weight.terms is not None
        self.weight.terms.append(RowFactors(index, right, self.weight.value.shape))
        return (None,)


def embedding(
    recording: "Recording",
    index: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """The rule for `F.embedding`; `sparse` makes no difference to a sum that gets noise everywhere."""
    _check_not_rescaled(max_norm)
    weights = recording.as_weights(weight)
    if weights is None or weights[0] is None:
        return NotImplemented
    if scale_grad_by_freq:
        raise Unsupported(
            "an Embedding with scale_grad_by_freq divides a record's gradient by how often the whole "
            "batch uses a row, so one record changes the others' gradients. Leave it out."
        )
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    layer = Lookup(weights[0], padding)
    return recording.run_batched(partial(recording.capture, layer), index)


def embedding_bag(
    recording: "Recording",
    index: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    *others: Any,
    **options: Any,
) -> Any:
    """The rule for `F.embedding_bag`: the general way, once it is known to change no row."""
    _check_not_rescaled(max_norm)
    return NotImplemented


def _check_not_rescaled(max_norm: float | None) -> None:
    """Raise before torch rescales the rows in place, which it does to frozen ones too."""
    if max_norm is not None:
        raise Unsupported(
            "an embedding with max_norm rescales the rows that a batch uses, so the weights show which "
            "rows those were. Leave max_norm out."
        )
