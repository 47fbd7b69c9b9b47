"""Terms: the forms in which one parameter's per-sample gradients are kept, and what each can compute.

`Dense` is materialised gradients, as Opacus's `grad_sample`; the layers in `rules` have the factored
forms, which give ghost norms from Gram matrices and a weighted sum from one product (book-keeping: one
backward pass serves norms and sum).

Positions of a factored record can cancel: two large ones, `+B` and `-B`, have a small norm and a large
rounding error. The norm of a factored term therefore counts what rounding may add to the record, a small
share of the sum over positions of the factors' norms (`products`; docs/guarantees/tape.md, 5).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from hush.core.parts import CoordinateMask
from hush.gradients.precision import blocked_product, double_norms, precise, vector_norms

CHUNK_ENTRIES = {"cpu": 2**22, "cuda": 2**28}
"""Entries that a chunk of the tape holds unless one record has more: near the caches, or enough to keep
a GPU busy."""

MATERIALISE_CHUNK = {"cpu": 2**20, "cuda": 2**28}
"""Entries of a parameter's gradients that are materialised at once to be clamped and summed."""

_NORM_CHUNK = {"cpu": 2**22, "cuda": 2**26}
"""Entries of factored gradients that are materialised at once to be measured."""

_UNDERFLOW = 2.0**-501
"""Root of what underflows in a square of up to 2**19 numbers in double precision."""

ROUNDING = 0.0024
"""How much more than its bound one record can move a weighted sum in single precision by rounding, as a
share of the bound, where a term says that its rounding is bounded: docs/guarantees/tape.md."""


class Term:
    """One parameter's per-sample gradients, from all its uses in the model or from one of them.

    A subclass is a frozen dataclass of tensors, records first, or of other terms, and of public values.
    """

    shape: torch.Size
    """Shape of the parameter."""

    @property
    def records(self) -> int:
        return len(next(self.tensors()))

    def rounding_bounded(self, records: int) -> bool:
        """Whether rounding of `weighted_sum` over a number of records is at most `ROUNDING`."""
        return True

    def tensors(self) -> Iterator[Tensor]:
        """The tensors that the term holds in memory."""
        for value in vars(self).values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, Term):
                yield from value.tensors()

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The term with a function applied to each of its tensors."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = function(value)
            elif isinstance(value, Term):
                changed[name] = value.map_tensors(function)
        return replace(self, **changed)  # type: ignore[type-var]

    def take(self, rows: Tensor | slice) -> Self:
        """The term of a subset of the records.

        Args:
            rows: Indices, a mask or a slice.
        """
        return self.map_tensors(lambda value: value[rows])

    def mask_records(self, keep: Tensor) -> Self:
        """The term with gradients of zero where `keep` is false; every record keeps its place."""
        return self.map_tensors(lambda value: zero_rows(value, keep))

    def dense(self) -> Tensor:
        """The materialised per-sample gradients: (records, *shape)."""
        raise NotImplementedError

    def of_units(self, count: int, scale: Tensor) -> "Term":
        """The term of units of privacy that own `count` consecutive records each.

        **Guarantee.** A unit's gradient as computed is a function of its own records and of shapes.

        Args:
            count: Records of a unit, at least two.
            scale: (records,), factor of each record's gradient in the sum of its unit.
        """
        raise NotImplementedError

    def norms(self, order: float) -> Tensor:
        """The l_order norm of each record's gradient.

        Returns:
            (records,): norm of the record's addend in `weighted_sum` as computed, understated by no more
            than `ROUNDING` allows; infinite or NaN if the gradient is, or may overflow on the way.
        """
        raise NotImplementedError

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """The sum over records of weight times gradient.

        Args:
            weights: (records,), not negative. Where it is 0 the gradient must be finite or masked.

        Returns:
            The sum in double precision, of the parameter's shape.
        """
        raise NotImplementedError

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> Tensor:
        """The sum over records of weight times gradient, with entries clamped to +-limit, then masked.

        Args:
            weights: (records,), not negative.
            limits: (records,), largest absolute entry of each record before weighting.
            mask: Zeroes coordinates at random, for plans that sample them.

        Returns:
            The sum in double precision, of the parameter's shape.
        """
        return materialised_clamped_sum(self, weights, limits, mask)


@dataclass(frozen=True, eq=False)
class Dense(Term):
    """Materialised per-sample gradients."""

    gradients: Tensor

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.gradients.shape[1:]

    def dense(self) -> Tensor:
        return precise(self.gradients)

    def of_units(self, count: int, scale: Tensor) -> "Dense":
        return Dense(scale_rows(self.gradients, scale).unflatten(0, (-1, count)).sum(1))

    def norms(self, order: float) -> Tensor:
        return vector_norms(precise(self.gradients), order)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        shape = self.gradients.shape[1:]
        rows = precise(self.gradients).reshape(len(self.gradients), math.prod(shape))
        return blocked_product(weights.to(rows.dtype)[:, None], rows).view(shape)


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


def materialised_norms(term: Term, order: float, device: torch.device) -> Tensor:
    """The l_order norms of a term's materialised gradients, some records at a time."""
    step = max(1, _NORM_CHUNK[device.type] // max(1, math.prod(term.shape)))
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


def product_bound(left: Tensor, right: Tensor, order: float = 2) -> Tensor:
    """Upper bound on each record's norm: the products of the factors' norms, summed over positions.

    Infinite where a factor is beyond the root of the largest number: the other may be so small that a
    weight takes its last bits.

    Args:
        left: (records, positions, rows).
        right: (records, positions, columns).
        order: of the norm.
    """
    factors = precise(left), precise(right)
    norms = [double_norms(part, order) for part in factors]
    beyond = torch.maximum(*norms) > torch.finfo(factors[0].dtype).max ** 0.5
    bounds = norms[0] * norms[1]
    if factors[0].dtype == torch.float64:
        # what underflows in one factor can be large in the other
        bounds = bounds + _UNDERFLOW * (norms[0] + norms[1])
    if bounds.shape[1] == 1:
        return bounds[:, 0].where(~beyond[:, 0], torch.inf)
    return bounds.sum(1).where(~beyond.any(1), torch.inf)


def finite_norms(norms: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
    """The norms in the precision of their records; infinite where positions or their partial sums may
    overflow it: where the bound exceeds 2^-6 of the largest number."""
    return norms.to(dtype).where(bound <= torch.finfo(dtype).max / 64, torch.inf)
