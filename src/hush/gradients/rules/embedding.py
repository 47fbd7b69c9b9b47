"""Rule and terms for embeddings.

The per-sample gradient of an embedding table is stored as the indices and gradients of the used rows.

A tied table (first and last layer of a language model) has one term for both uses, because the sum of
both gradients is clipped.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hush.core.errors import Unsupported
from hush.core.parts import CoordinateMask
from hush.gradients.precision import double_norms, precise, precise_dtype, vector_norms
from hush.gradients.products import (
    compare_grams,
    gram,
    gram_chunks,
    gram_error,
    product_error,
    uses_kernels,
)
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.terms import (
    Dense,
    Term,
    by_unit,
    clamp_rows,
    finite_norms,
    materialised_norms,
    product_bound,
    scale_rows,
)
from hush.gradients.tree import Gradients

if TYPE_CHECKING:
    from hush.gradients.recording import Recording
    from hush.gradients.rules import Weight

_ROW_CHUNK = {"cpu": 2**17, "cuda": 2**28}
"""Number of entries summed at a time; on a CPU the cache limits it."""

CANCELLED = 2.0**-10
"""Lower bound for a record's norm, relative to its length (the sum of the norms of its positions). The
length of a clipped record is then at most 2**10 clipping norms, even if its positions cancel."""

_POSITION_LIMIT = 2**28
"""Maximum of records**2 * positions for a rounding error of sums of at most 2**-15 clipping norms."""


@dataclass(frozen=True, eq=False)
class RowFactors(Term):
    """Per-sample gradients of an embedding table: `sum_t e[index[:, t]] (x) right[:, t]`."""

    index: Tensor
    right: Tensor
    shape: torch.Size

    def rounding_bounded(self, records: int) -> bool:
        # sums are computed in double precision
        return records**2 * self.index.shape[1] <= _POSITION_LIMIT

    def dense(self) -> Tensor:
        # double precision, as in norms and sums, because positions may cancel
        rows = self.right.double().flatten(0, 1)
        whole = rows.new_zeros(self.records * self.shape[0], self.shape[1])
        whole.index_add_(0, self._keys(), rows)
        return whole.view(-1, *self.shape).to(precise_dtype(self.right))

    def of_units(self, count: int, scale: Tensor) -> "RowFactors":
        right = by_unit(scale_rows(self.right, scale), count)
        return RowFactors(by_unit(self.index, count), right, self.shape)

    def norms(self, order: float) -> Tensor:
        dtype = precise_dtype(self.right)
        if order == 2 and uses_kernels(self.right):
            # Gram matrices account for repeated rows
            pairs = []
            for rows in gram_chunks(self.records, self.index.shape[1]):
                index, values = self.index[rows], gram(self.right[rows])
                pairs.append(((index[:, :, None] == index[:, None]).to(values.dtype), values))
            squares = compare_grams(pairs, gram_error(self.right))
            norms = squares.norms(0.0).maximum(CANCELLED * squares.lengths)
            return finite_norms(norms, squares.lengths, dtype)
        used, keys = self._used_rows()
        record = keys // self.shape[0]
        row_norms = vector_norms(used, order)
        norms = row_norms.new_zeros(self.records).scatter_reduce_(0, record, row_norms, "amax")
        if order != torch.inf:
            shares = row_norms / norms.clamp(min=torch.finfo(torch.float64).tiny)[record]
            norms = norms * torch.zeros_like(norms).index_add_(0, record, shares**order) ** (1 / order)
        lengths = self.lengths(order)
        bound = lengths if order == 2 else self.lengths(2)
        return finite_norms(norms.maximum(CANCELLED * lengths), bound, dtype)

    def lengths(self, order: float) -> Tensor:
        """Sum over positions of the norms of their gradients: (records,)."""
        return double_norms(precise(self.right), order).sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = torch.zeros(self.shape, dtype=torch.float64, device=weights.device)
        step = max(1, _ROW_CHUNK[weights.device.type] // max(1, self.right.shape[1:].numel()))
        for start in range(0, self.records, step):
            chunk = slice(start, start + step)
            rows = (self.right[chunk].double() * weights[chunk, None, None]).flatten(0, 1)
            index = self.index[chunk].flatten()
            if total.is_cuda:
                # sorts by index, because atomic additions to frequent rows are slow
                total += torch.ops.aten.embedding_dense_backward(rows, index, len(total), -1, False)
            else:
                total.index_add_(0, index, rows)
        return total

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> Tensor:
        """Clamp and mask only the rows that are used; other rows are zero."""
        used, keys = self._used_rows()
        record = keys // self.shape[0]
        rows = used.to(precise_dtype(self.right))
        values = clamp_rows(rows, limits[record], mask).double() * weights[record, None]
        return values.new_zeros(self.shape).index_add_(0, keys % self.shape[0], values)

    def _used_rows(self) -> tuple[Tensor, Tensor]:
        """Gradients of the rows that each record uses, and their keys (record * rows + row).

        Gradients are in double precision, padded at the end with zero rows that have arbitrary keys.
        """
        keys, sources = self._keys().sort()
        place = (keys[1:] != keys[:-1]).long().cumsum(0)
        place = torch.cat([torch.zeros_like(keys[:1]), place])
        # double precision, because positions may cancel and the order of additions on a GPU varies
        rows = self.right.double().flatten(0, 1)
        places = torch.empty_like(place).index_copy_(0, sources, place)
        used = torch.zeros_like(rows).index_add_(0, places, rows)
        return used, torch.zeros_like(keys).index_copy_(0, place, keys)

    def _keys(self) -> Tensor:
        start = torch.arange(self.records, device=self.index.device) * self.shape[0]
        return (self.index + start[:, None]).flatten()


@dataclass(frozen=True, eq=False)
class Lookup:
    """Table lookup; the padding row is not trained."""

    weight: "Weight"
    padding: int | None

    def forward(self, index: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return functional.embedding(index, self.weight.value), (index,)

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]) -> Gradients:
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
    """Rule for `F.embedding`; `sparse` is ignored, because every row gets noise."""
    weights = recording.as_weights(weight)
    if weights is None or weights[0] is None or max_norm is not None:
        return NotImplemented  # the probe raises for max_norm, which rescales rows
    if scale_grad_by_freq:
        raise Unsupported(
            "an Embedding with scale_grad_by_freq divides gradients by the number of uses of a row in "
            "the batch, so a record changes the gradients of other records. Leave it out."
        )
    padding = None if padding_idx is None else padding_idx % weight.shape[0]
    layer = Lookup(weights[0], padding)
    return recording.run_batched(partial(recording.capture, layer), index)


@dataclass(frozen=True, eq=False)
class TiedFactors(Term):
    """Per-sample gradients of a tied embedding, the first and last layer of a language model."""

    rows: RowFactors
    outer: OuterFactors

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.rows.shape

    def rounding_bounded(self, records: int) -> bool:
        return self.rows.rounding_bounded(records)

    def dense(self) -> Tensor:
        return self.rows.dense() + self.outer.dense()

    def of_units(self, count: int, scale: Tensor) -> Term:
        return merge_terms([self.rows.of_units(count, scale), self.outer.of_units(count, scale)])

    def norms(self, order: float) -> Tensor:
        error, dtype = product_error(self.outer.left), precise_dtype(self.rows.right)
        if order == 2:
            chunks = gram_chunks(self.records, self.outer.left.shape[1] + self.rows.index.shape[1])
            parts = [self._euclidean_norms(chunk, error) for chunk in chunks]
            norms, lengths = (torch.cat(part) for part in zip(*parts, strict=True))
            return finite_norms(norms.maximum(CANCELLED * lengths), lengths, dtype)
        outer = self.outer.left, self.outer.right
        lengths = self.rows.lengths(order) + product_bound(*outer, order)
        # norm and sum use separate products, so the error counts twice
        norms = materialised_norms(self, order, self.rows.right.device).double() + 2 * error * lengths
        norms = norms.maximum(self.outer.norms(order).double())
        bound = self.rows.lengths(2) + product_bound(*outer)
        return finite_norms(norms.maximum(CANCELLED * lengths), bound, dtype)

    def _euclidean_norms(self, chunk: slice, sum_error: float) -> tuple[Tensor, Tensor]:
        """Norms and lengths of a chunk of records, from Gram matrices.

        The norm is at least the norm of the outer products alone. The sum adds outer products, in single
        precision, separately from lookups, and the two may cancel.
        """
        left, index, rows = self.outer.left[chunk], self.rows.index[chunk], self.rows.right[chunk]
        right = self.outer.right[chunk]
        right = torch.cat([right, rows.to(precise_dtype(right))], 1)
        error, product = gram_error(left) + gram_error(right), slice(left.shape[1])
        values = gram(right)
        # a lookup is a product with a unit vector as left factor
        both = left.gather(2, index[:, None].expand(-1, left.shape[1], -1)).to(values.dtype)
        same = (index[:, :, None] == index[:, None]).to(values.dtype)
        top, bottom = torch.cat([gram(left), both], 2), torch.cat([both.mT, same], 2)
        grams = torch.cat([top, bottom], 1), values
        whole = compare_grams([grams], error)
        left_gram, right_gram = (part[:, product, product] for part in grams)
        alone = compare_grams([(left_gram, right_gram)], error)
        return whole.norms(sum_error).maximum(alone.norms(sum_error)), whole.lengths

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.rows.weighted_sum(weights) + self.outer.weighted_sum(weights)


def merge_terms(terms: Sequence[Term]) -> Term:
    """Term for the summed gradients of all uses of a parameter."""
    outer = [term for term in terms if isinstance(term, OuterFactors)]
    rows = [term for term in terms if isinstance(term, RowFactors)]
    if len(outer) + len(rows) < len(terms):
        return Dense(sum((term.dense() for term in terms[1:]), start=terms[0].dense()))
    if outer and rows:
        return TiedFactors(_joined(rows), _joined(outer))
    joined: Term = _joined(outer or rows)
    return joined


def _joined(terms: Sequence[Any]) -> Any:
    """Merge the terms of several uses by concatenating their positions."""
    if len(terms) == 1:
        return terms[0]
    parts = [vars(term) for term in terms]
    joined = {name: torch.cat([part[name] for part in parts], 1) for name in parts[0] if name != "shape"}
    return replace(terms[0], **joined)
