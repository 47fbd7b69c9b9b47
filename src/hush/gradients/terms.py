"""Terms: per-sample gradients of one parameter, materialised or factored.

`Dense` stores materialised gradients, like Opacus's `grad_sample`. Layers in `rules` create factored
terms. Their ghost norms come from Gram matrices and their weighted sum from one matrix product. Both use
the same backward pass (book-keeping, Bu et al. 2023).

The positions of a factored record can cancel: the sum of `+B` and `-B` has a small norm but a large
rounding error. The norm of a factored term therefore includes a bound on the rounding error, which is
relative to the sum over positions of the products of the factors' norms (`products`;
docs/guarantees/tape.md, 5).
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
"""Maximum number of entries per chunk; a chunk fits the cache of a CPU, and occupies a GPU."""

MATERIALISE_CHUNK = {"cpu": 2**20, "cuda": 2**28}
"""Number of gradient entries of a parameter that are materialised at a time for a clamped sum."""

_NORM_CHUNK = {"cpu": 2**22, "cuda": 2**26}
"""Number of entries of factored gradients that are materialised at a time for norms."""

_UNDERFLOW = 2.0**-501
"""Square root of the underflow error in a sum of up to 2**19 squares in double precision."""

ROUNDING = 0.0024
"""Relative rounding slack on the sensitivity of a weighted sum in single precision, for terms with
bounded rounding: docs/guarantees/tape.md."""


class Term:
    """Per-sample gradients of one parameter, for one use or all uses in a forward pass.

    Subclasses are frozen dataclasses. Their fields are tensors (records along the first dimension),
    other terms, and public values.
    """

    shape: torch.Size
    """Shape of the parameter."""

    @property
    def records(self) -> int:
        return len(next(self.tensors()))

    def rounding_bounded(self, records: int) -> bool:
        """Whether the relative rounding error of `weighted_sum` over `records` is at most `ROUNDING`."""
        return True

    def tensors(self) -> Iterator[Tensor]:
        """Tensors of the term."""
        for value in vars(self).values():
            if isinstance(value, Tensor):
                yield value
            elif isinstance(value, Term):
                yield from value.tensors()

    def map_tensors(self, function: Callable[[Tensor], Tensor]) -> Self:
        """Term with a function applied to each of its tensors."""
        changed: dict[str, Any] = {}
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                changed[name] = function(value)
            elif isinstance(value, Term):
                changed[name] = value.map_tensors(function)
        return replace(self, **changed)  # type: ignore[type-var]

    def take(self, rows: Tensor | slice) -> Self:
        """Term of a subset of the records.

        Args:
            rows: Indices, a mask or a slice.
        """
        return self.map_tensors(lambda value: value[rows])

    def mask_records(self, keep: Tensor) -> Self:
        """Term with zero gradients for the records that `keep` excludes; positions are unchanged."""
        return self.map_tensors(lambda value: zero_rows(value, keep))

    def dense(self) -> Tensor:
        """Materialised per-sample gradients: (records, *shape)."""
        raise NotImplementedError

    def of_units(self, count: int, scale: Tensor) -> "Term":
        """Term of users with `count` consecutive records each.

        **Guarantee.** The computed gradient of a user depends only on the user's records and on shapes.

        Args:
            count: Number of records of a user, at least two.
            scale: Weight of each record in the sum of its user, of shape (records,).
        """
        raise NotImplementedError

    def norms(self, order: float) -> Tensor:
        """Per-sample l_order norms: (records,).

        Returns:
            Norm of each record's contribution to the computed `weighted_sum`, up to the relative error
            that `ROUNDING` covers. The norm is not finite if the gradient is not finite or may overflow.
        """
        raise NotImplementedError

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Weighted sum of the per-sample gradients.

        Args:
            weights: Non-negative weights of shape (records,). Gradients of weight 0 must be finite or
                masked.

        Returns:
            Sum in double precision, of the parameter's shape.
        """
        raise NotImplementedError

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> Tensor:
        """`weighted_sum` after clamping each entry to +-limit and masking coordinates.

        Args:
            weights: Non-negative weights of shape (records,).
            limits: (records,). Largest absolute entry of each record before weighting.
            mask: Function that zeroes random coordinates, for plans that sample coordinates.

        Returns:
            Sum in double precision, of the parameter's shape.
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
        rows = precise(self.gradients).reshape(len(self.gradients), shape.numel())
        return blocked_product(weights.to(rows.dtype).unsqueeze(1), rows).view(shape)


def zero_rows(values: Tensor, keep: Tensor) -> Tensor:
    """Replace the rows that `keep` excludes by zeros, even if they are not finite."""
    return values.where(column(keep, values), torch.zeros_like(values[:1]))


def column(by_record: Tensor, values: Tensor) -> Tensor:
    """Reshape per-record numbers to broadcast over the values."""
    return by_record.view(-1, *[1] * (values.dim() - 1))


def scale_rows(values: Tensor, scale: Tensor) -> Tensor:
    """Scale the values of each record, in at least single precision."""
    wide = precise(values)
    return wide * column(scale.to(wide.dtype), wide)


def by_unit(positions: Tensor, count: int) -> Tensor:
    """Concatenate the positions of each user's records: (users, count * positions, ...)."""
    stacked: Tensor = positions.unflatten(0, (-1, count)).flatten(1, 2)
    return stacked


def materialised_norms(term: Term, order: float, device: torch.device) -> Tensor:
    """l_order norms of a term's gradients, materialised in chunks of records."""
    step = max(1, _NORM_CHUNK[device.type] // max(1, math.prod(term.shape)))
    starts = range(0, max(1, term.records), step)
    parts = [vector_norms(term.take(slice(start, start + step)).dense(), order) for start in starts]
    return torch.cat(parts)


def materialised_clamped_sum(
    term: Term, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
) -> Tensor:
    """`Term.clamped_weighted_sum` of gradients materialised in chunks of records."""
    size = math.prod(term.shape)
    step = max(1, MATERIALISE_CHUNK[weights.device.type] // max(1, size))
    total = torch.zeros(term.shape, dtype=torch.float64, device=weights.device)
    for start in range(0, term.records, step):
        rows = slice(start, start + step)
        gradients = term.take(rows).dense()
        values = clamp_rows(gradients.reshape(len(gradients), size), limits[rows], mask)
        # sum in double precision, because the selection of records may depend on a record
        values.mul_(weights[rows].to(values.dtype)[:, None])
        total += values.sum(0, dtype=torch.float64).view(term.shape)
    return total


def clamp_rows(rows: Tensor, limits: Tensor, mask: CoordinateMask | None) -> Tensor:
    """Copy of the rows, clamped to each row's limit and then masked."""
    limit = limits.to(rows.dtype)[:, None]
    # minimum and maximum are twice as fast as clamp()
    values = torch.maximum(rows, -limit)
    torch.minimum(values, limit, out=values)
    return values if mask is None else mask(values)


def product_bound(left: Tensor, right: Tensor, order: float = 2) -> Tensor:
    """Upper bounds on the per-sample norms: products of the factors' norms, summed over positions.

    The bound is infinite if the norm of a factor exceeds the square root of the largest number, because
    the other factor could then underflow.

    Args:
        left: Left factors of shape (records, positions, rows).
        right: Right factors of shape (records, positions, columns).
        order: Order of the norm.
    """
    factors = precise(left), precise(right)
    norms = [double_norms(part, order) for part in factors]
    beyond = torch.maximum(*norms) > torch.finfo(factors[0].dtype).max ** 0.5
    bounds = norms[0] * norms[1]
    if factors[0].dtype == torch.float64:
        # an underflow in one factor can be multiplied by a large entry of the other
        bounds = bounds + _UNDERFLOW * (norms[0] + norms[1])
    if bounds.shape[1] == 1:
        return bounds[:, 0].where(~beyond[:, 0], torch.inf)
    return bounds.sum(1).where(~beyond.any(1), torch.inf)


def finite_norms(norms: Tensor, bound: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast norms to a dtype; norms whose partial sums may overflow become infinite.

    Args:
        norms: Norms in double precision.
        bound: Upper bounds; a norm is infinite if its bound exceeds 2^-6 of the largest number.
        dtype: Dtype of the result.
    """
    return norms.to(dtype).where(bound <= torch.finfo(dtype).max / 64, torch.inf)
