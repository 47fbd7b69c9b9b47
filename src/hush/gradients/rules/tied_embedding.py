"""Tables that are looked up and multiplied with: a language model's first and last layer.

All uses of a parameter are one term, because its gradient is their sum and is clipped as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hush.core.tape import CoordinateMask
from hush.gradients.precision import precise_dtype
from hush.gradients.products import (
    compare_grams,
    gram,
    gram_chunks,
    gram_error,
    product_error,
)
from hush.gradients.rules.embedding import CANCELLED, RowFactors
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.terms import (
    Dense,
    Term,
    finite_norms,
    materialised_clamped_sum,
    materialised_norms,
    product_bound,
)


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
        return self.rows.rounding_bounded(records)

    def take(self, rows: Tensor | slice) -> "TiedFactors":
        return TiedFactors(self.rows.take(rows), self.outer.take(rows))

    def mask_records(self, keep: Tensor) -> "TiedFactors":
        return TiedFactors(self.rows.mask_records(keep), self.outer.mask_records(keep))

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
        # the product is materialised to be measured, and multiplied anew to be added: off twice
        norms = materialised_norms(self, order, self.rows.right.device).double() + 2 * error * lengths
        norms = norms.maximum(self.outer.norms(order).double())
        bound = self.rows.lengths(2) + product_bound(*outer)
        return finite_norms(norms.maximum(CANCELLED * lengths), bound, dtype)

    def _euclidean_norms(self, chunk: slice, sum_error: float) -> tuple[Tensor, Tensor]:
        """Norms and lengths of some records, from Gram matrices.

        A norm is at least that of the product alone, which others' products are added to in single
        precision: lookups that cancel it are added to the sum elsewhere.
        """
        outer, rows = self.outer.take(chunk), self.rows.right[chunk]
        right = torch.cat([outer.right, rows.to(precise_dtype(outer.right))], 1)
        error, product = gram_error(outer.left) + gram_error(right), slice(outer.left.shape[1])
        grams = self._grams(right, chunk)
        whole = compare_grams([grams], error)
        left_gram, right_gram = (part[:, product, product] for part in grams)
        alone = compare_grams([(left_gram, right_gram)], error)
        return whole.norms(sum_error).maximum(alone.norms(sum_error)), whole.lengths

    def _grams(self, right: Tensor, chunk: slice) -> tuple[Tensor, Tensor]:
        """Gram matrices, with a lookup as a product whose left factor is 1 at its index."""
        left, index, values = self.outer.left[chunk], self.rows.index[chunk], gram(right)
        both = left.gather(2, index[:, None].expand(-1, left.shape[1], -1)).to(values.dtype)
        same = (index[:, :, None] == index[:, None]).to(values.dtype)
        top, bottom = torch.cat([gram(left), both], 2), torch.cat([both.mT, same], 2)
        return torch.cat([top, bottom], 1), values

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return self.rows.weighted_sum(weights) + self.outer.weighted_sum(weights)

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
    if len(terms) == 1:
        return terms[0]
    left, right = torch.cat([t.left for t in terms], 1), torch.cat([t.right for t in terms], 1)
    return OuterFactors(left, right, terms[0].shape)


def _merge_rows(terms: Sequence[RowFactors]) -> RowFactors:
    if len(terms) == 1:
        return terms[0]
    index, right = torch.cat([t.index for t in terms], 1), torch.cat([t.right for t in terms], 1)
    return RowFactors(index, right, terms[0].shape)
