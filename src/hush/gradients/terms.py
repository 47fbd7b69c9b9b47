"""The forms in which a parameter's per-example gradients are kept, and what each can answer.

Everything here is worked out in single precision at least: a sum rounded to half precision can jump
by many clipping norms when one record joins it. Weighted sums are in double precision, of products of
at most `SUMMED` records each.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Protocol, Self

import torch
from torch import Tensor

from hush.core.tape import CoordinateMask

CHUNK = {"cpu": 2**22, "cuda": 2**28}
"""How many numbers a chunk holds unless one record has more: near the caches, or enough to keep busy."""

PASSED = {"cpu": 2**20, "cuda": 2**28}
"""How many numbers of a parameter's gradients are passed over at once, one rule after the other."""

SUMMED = 128
"""Records that are added up in single precision; the sums of so many are added in double precision."""

ROUNDING = 0.0024
"""How much more than its bound one record can move a weighted sum in single precision by rounding, as a
share of the bound, where a term says that its rounding is bounded: docs/guarantees/tape.md."""

_TILE = 2**18
"""How many numbers of a sum are worked out at once on a CPU, in the cache."""

_RUN = 1024
"""How many numbers are summed in their own precision."""

_WRITTEN = 2**22
"""How many numbers may be written out at once to measure gradients that are kept as factors."""


class Term(Protocol):
    """One parameter's gradients, one per record; all or those of one use of it."""

    @property
    def records(self) -> int: ...

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""

    def rounding_bounded(self, records: int) -> bool:
        """Whether rounding of `weighted_sum` over so many records is bounded (`ROUNDING`)."""

    def take(self, rows: Tensor | slice) -> Self:
        """The same for some of the records."""

    def zeroed(self, keep: Tensor) -> Self:
        """The same with gradients of zero where `keep` is false."""

    def dense(self) -> Tensor:
        """The gradients written out: (records, *shape)."""

    def norms(self, order: float) -> Tensor:
        """The l_order norm of each record's gradient."""

    def weighted_sum(self, weights: Tensor, most: float = math.inf) -> Tensor:
        """The sum over records, each times its weight, with which it is `most` long, in doubles."""

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
    ) -> Tensor:
        """The same of gradients whose numbers are cut off at the record's limit, and then thinned."""


@dataclass(frozen=True, eq=False)
class Dense:
    """Gradients written out."""

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

    def zeroed(self, keep: Tensor) -> "Dense":
        return Dense(zero_rows(self.gradients, keep))

    def dense(self) -> Tensor:
        return precise(self.gradients)

    def norms(self, order: float) -> Tensor:
        return vector_norms(self.dense(), order)

    def weighted_sum(self, weights: Tensor, most: float = math.inf) -> Tensor:
        gradients = self.dense()
        rows = gradients.reshape(len(gradients), math.prod(self.shape))
        return blocked_product(weights.to(rows.dtype)[:, None], rows).view(self.shape)

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
    ) -> Tensor:
        return clamped_sum_of_rows(self, weights, limits, thin)


def zero_rows(values: Tensor, keep: Tensor) -> Tensor:
    """The values with zeros in the rows that are not kept, which may not be finite."""
    return values.where(keep.view(-1, *[1] * (values.dim() - 1)), torch.zeros_like(values[:1]))


def blocked_product(left: Tensor, right: Tensor) -> Tensor:
    """left.T @ right in double precision, from products of `SUMMED` rows each in their own.

    So rounding is that of one block of rows, however many there are.
    """
    return _block_sums(left, right) if left.is_cuda else _tiled_block_sums(left, right)


def _block_sums(left: Tensor, right: Tensor) -> Tensor:
    """The products of all blocks at once, and then their sum."""
    blocks, rest = divmod(len(left), SUMMED)
    whole = blocks * SUMMED
    if not blocks:
        return (left.mT @ right).double()
    shape = blocks, SUMMED
    parts = left[:whole].unflatten(0, shape).mT @ right[:whole].unflatten(0, shape)
    total: Tensor = parts.sum(0, dtype=torch.float64)
    return total.add_(left[whole:].mT @ right[whole:]) if rest else total


def _tiled_block_sums(left: Tensor, right: Tensor) -> Tensor:
    """The products a tile of the result at a time, so that each is added while it is in the cache."""
    total = torch.empty(left.shape[1], right.shape[1], dtype=torch.float64)
    wide = max(1, min(right.shape[1], _TILE))
    high = max(1, _TILE // wide)
    memory = left.new_empty(min(high * wide, total.numel()))
    for top, first in product(range(0, len(total), high), range(0, total.shape[1], wide)):
        tile = total[top : top + high, first : first + wide]
        part = memory[: tile.numel()].view(tile.shape)
        for block in range(0, max(1, len(left)), SUMMED):
            some = slice(block, block + SUMMED)
            torch.mm(left[some, top : top + high].mT, right[some, first : first + wide], out=part)
            tile.add_(part) if block else tile.copy_(part)
    return total


def precise(values: Tensor) -> Tensor:
    """The values in single precision at least."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


def vector_norms(values: Tensor, order: float) -> Tensor:
    """The l_order norm along all dimensions but the first.

    Single precision loses several per cent over millions of entries, and underflows in high powers: long
    rows are measured a run at a time, and the runs together in double precision.
    """
    rows = values.reshape(len(values), math.prod(values.shape[1:]))
    if rows.shape[1] == 0:
        return rows.new_zeros(len(rows))
    if order in (1, 2, math.inf):
        count = rows.shape[1] // _RUN
        runs = rows[:, : count * _RUN].unflatten(1, (count, _RUN)), rows[:, count * _RUN :].unsqueeze(1)
        sizes = [
            torch.linalg.vector_norm(run, ord=order, dim=2) for run in runs if run.shape[1:].numel()
        ]
        return _rescued(rows, _double_norms(torch.cat(sizes, dim=1), order), order).to(values.dtype)
    largest = rows.abs().amax(1, keepdim=True).double()
    shares = rows / largest.clamp(min=torch.finfo(torch.float64).tiny)
    return (largest[:, 0] * _double_norms(shares, order)).to(values.dtype)


def _rescued(rows: Tensor, norms: Tensor, order: float) -> Tensor:
    """The norms, worked out again in double precision where a square overflowed in single precision.

    A gradient of that size is clipped to nearly nothing; taken for infinite it would jump to nothing.
    """
    if being_captured() or rows.dtype == torch.float64:
        return norms
    lost = ~norms.isfinite()
    if bool(lost.any()):
        norms[lost] = _double_norms(rows[lost], order)
    return norms


def _double_norms(rows: Tensor, order: float) -> Tensor:
    each: Tensor = torch.linalg.vector_norm(rows, ord=order, dim=1, dtype=torch.float64)
    return each


def materialised_norms(term: Term, order: float) -> Tensor:
    """The norms of the written-out gradients, some records at a time."""
    step = max(1, _WRITTEN // max(1, math.prod(term.shape)))
    starts = range(0, max(1, term.records), step)
    parts = [vector_norms(term.take(slice(start, start + step)).dense(), order) for start in starts]
    return torch.cat(parts)


def clamped_sum_of_rows(
    term: Term, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
) -> Tensor:
    """What `held_sum` wants, of gradients that are written out, some records at a time."""
    size = math.prod(term.shape)
    step = max(1, PASSED[weights.device.type] // max(1, size))
    total = torch.zeros(term.shape, dtype=torch.float64, device=weights.device)
    for start in range(0, term.records, step):
        some = slice(start, start + step)
        written = term.take(some).dense()
        values = clamp_rows(written.reshape(len(written), size), limits[some], thin)
        # in double precision: which records are here may depend on one of them
        values.mul_(weights[some].to(values.dtype)[:, None])
        total += values.sum(0, dtype=torch.float64).view(term.shape)
    return total


def clamp_rows(rows: Tensor, limits: Tensor, thin: CoordinateMask | None) -> Tensor:
    """The rows in new memory, the numbers of each cut off at its limit, and then thinned."""
    most = limits.to(rows.dtype)[:, None]
    # twice as fast as clamp()
    values = torch.maximum(rows, -most)
    torch.minimum(values, most, out=values)
    return values if thin is None else thin(values)


def being_captured() -> bool:
    """Whether this work is being recorded for replay, when no decision may depend on a value.

    Then a norm that would have to be looked at again is NaN instead, and the replayed work is done
    anew where one turns up.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
