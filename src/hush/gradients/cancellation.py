"""Positions of a record that cancel each other: when its norm and its sum are still to be trusted.

A record of two large positions, `+B` and `-B`, has a small norm and a large rounding error, in its own
norm and in the sum it is added to (docs/guarantees/tape.md, 5). Its norm is not believed, and it is
written out before it is added.
"""

import math
from typing import Protocol

import torch
from torch import Tensor

from hush.gradients.terms import Term, being_captured, clamped_sum_of_rows, materialised_norms, precise

_CANCELLED = 2.0**-10
"""The share of its upper bound below which a norm is of positions that mostly cancel each other.

Then rounding could be seen in its square, though Gram matrices are formed in double precision, and a
record whose norm is understated would not be clipped enough. Added up position by position with others,
such a record would also leave its rounding in their sum. It is written out.
"""

MANY = 2**28
"""Square of the records times their positions up to which sums in double precision round within 2**-15
of what a record may add: 2**-53 times this, times 2**10 for positions that cancel."""


class Factored(Term, Protocol):
    """A term of which the positions can be added up without writing records out."""

    def lengths(self) -> Tensor: ...

    def direct(self, weights: Tensor) -> Tensor: ...


def few_enough(factor: Tensor, records: int, positions: int) -> bool:
    """Whether positions that are added up with those of all records round within `ROUNDING`.

    They may cancel within a record, so that each is up to 2**10 times as long as what the record adds.
    """
    return factor.dtype == torch.float64 and records**2 * positions <= MANY


def cancelling_apart(term: Factored, weights: Tensor, most: float) -> Tensor:
    """The weighted sum, with records written out of which more cancels than is left.

    `most` is the longest that a record is with its weight. (In a replay such a record's norm is NaN.)
    """
    if most == math.inf or being_captured():
        return term.direct(weights)
    apart = _CANCELLED * weights * term.lengths() > most
    if not bool(apart.any()):
        return term.direct(weights)
    own = weights[apart]
    written = clamped_sum_of_rows(term.take(apart), own, torch.full_like(own, math.inf), None)
    return term.direct(weights.where(~apart, 0.0)) + written


def product_bound(left: Tensor, right: Tensor, kind: torch.dtype) -> Tensor:
    """The products of the factors' norms, summed over positions.

    Infinite where a factor is beyond the root of the largest number: the other may be so small that a
    weight takes its last bits.
    """
    beyond = torch.maximum(left, right) > torch.finfo(kind).max ** 0.5
    return (left * right).sum(1).where(~beyond.any(1), torch.inf)


def bounded(norms: Tensor, bound: Tensor) -> Tensor:
    """The norms, infinite where positions, or what they add up to on the way, may be too large for
    their precision: bounds of 2^-6 of the largest number are."""
    return norms.where(bound <= torch.finfo(norms.dtype).max / 64, torch.inf)


def nan_if_cancelled(norms: Tensor, bound: Tensor) -> Tensor:
    """The same, and NaN in a replay where most of a record cancels: it is then done anew."""
    norms = bounded(norms, bound)
    return norms.where(norms >= _CANCELLED * bound, torch.nan) if being_captured() else norms


def position_norms(positions: Tensor) -> Tensor:
    """The Euclidean norm at each position."""
    each: Tensor = torch.linalg.vector_norm(precise(positions), dim=-1, dtype=torch.float64)
    return each


def norms_or_recompute(term: Term, squares: Tensor, bound: Tensor, kind: torch.dtype) -> Tensor:
    """The roots of the squares; where most has cancelled, the norms of what is written out."""
    cancelled = squares < (_CANCELLED * bound).square()
    roots = squares.clamp(min=0).sqrt().to(kind)
    if not being_captured() and bool(cancelled.any()):
        roots[cancelled] = materialised_norms(term.take(cancelled), 2)
    return nan_if_cancelled(roots, bound)
