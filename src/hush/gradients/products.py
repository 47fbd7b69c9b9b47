"""Per-sample sums of outer products, and upper bounds on their norms.

A record's gradient of a matrix is `sum_t left[t] (x) right[t]` over its positions t. Positions may
cancel, so the rounding error is relative to the *length* of the gradient, not to its norm. The length is
the sum over positions of `|left[t]| |right[t]|`. The functions here return upper bounds on the norm of
the computed product. A clipped record therefore contributes at most the clipping norm, in any precision
(docs/guarantees/tape.md, 5). Each record has a separate product, so the rounding of one record does not
affect other records. Factors have shape (records, positions, entries).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from hush.core.randomness import has_triton
from hush.gradients.precision import SUM_BLOCK, precise, record_products

_HALF = (torch.bfloat16, torch.float16)

_TENSOR_CORE = 2.0**-22
"""Truncation error of an addition on tensor cores, relative to the sum of absolute values."""

_HALVES = 3 * 2.0**-16
"""Error of a single precision product whose factors are split into two bfloat16 numbers."""

_THREE_TF32 = 2.0**-20
"""Error of a single precision product computed as three TensorFloat-32 products."""

_UNDERFLOW = {torch.float32: 2.0**-53, torch.float64: 2.0**-501}
"""Square root of the underflow error in a Gram matrix of up to 2**19 entries, by dtype."""

_COPIED = 2**17
"""Number of entries of a factor copied at a time."""

_GRAM_ENTRIES = 2**26
"""Maximum number of entries of Gram matrices in memory."""


@dataclass(frozen=True, eq=False)
class GramSquares:
    """Squared gradient norms from Gram matrices over positions, with bounds on the rounding error."""

    sums: Tensor
    """Three rows in double precision: squared norms, lengths, and sums over positions of the factors'
    norms. Shape (3, records)."""
    error: float
    """Bound on the error of the squared norms, relative to the squared lengths."""
    underflow: float
    """Bound on the underflow error, relative to the last row."""

    @property
    def lengths(self) -> Tensor:
        """Lengths of the per-sample gradients: (records,)."""
        return self.sums[1]

    def norms(self, sum_error: float) -> Tensor:
        """Upper bounds on the norms of the computed products.

        Args:
            sum_error: Rounding error of the products, relative to the length.
        """
        return norms_of([self], [sum_error])[0]


def norms_of(squares: Sequence[GramSquares], sum_errors: Sequence[float]) -> Tensor:
    """`GramSquares.norms` of several terms at once: (terms, records)."""
    sums = torch.stack([part.sums for part in squares])
    constants = tuple(
        (part.error, error, part.underflow) for part, error in zip(squares, sum_errors, strict=True)
    )
    hidden, off, lost = _on_device(constants, sums.device).unbind(1)
    square, length, sizes = sums.unbind(1)
    norms = (square.clamp(min=0) + hidden[:, None] * length.square()).sqrt()
    # the squared term covers products of two small numbers
    vanished = lost[:, None] * sizes + 2.0**61 * lost[:, None].square()
    return norms + off[:, None] * length + vanished


@lru_cache
def _on_device(values: tuple[tuple[float, ...], ...], device: torch.device) -> Tensor:
    """Convert numbers to a tensor; cached, because CUDA graphs cannot copy from the host."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def uses_kernels(factor: Tensor) -> bool:
    """Whether products with this factor use the tensor core kernels."""
    return factor.is_cuda and factor.dtype != torch.float64 and has_triton()


def gram(factor: Tensor) -> Tensor:
    """Gram matrix of each record's positions: (records, positions, positions)."""
    if uses_kernels(factor):
        from hush.gradients.kernels.product_kernel import gram as on_tensor_cores

        return on_tensor_cores(factor)
    wide = factor.double()
    return wide @ wide.mT


def gram_error(factor: Tensor) -> float:
    """Error of an entry of `gram`, relative to the product of the norms of its two positions."""
    if not uses_kernels(factor):
        return double_gram_error(*factor.shape[1:])
    from hush.gradients.kernels.product_kernel import GRAM_RUN

    entries, run = factor.shape[2], GRAM_RUN[factor.element_size()]
    left_out = 0.0 if factor.dtype in _HALF else _THREE_TF32
    return left_out + 1.01 * (run + 4) * _TENSOR_CORE + (entries / run + 5) * 2.0**-24


def double_gram_error(positions: int, entries: int) -> float:
    """`gram_error` in double precision."""
    return (entries + positions**2 + 4) * 2.0**-52


def gram_squares(left: Tensor, right: Tensor) -> GramSquares:
    """Squared norms of `sum_t left[:, t] (x) right[:, t]`, in chunks of records."""
    dtype = torch.promote_types(left.dtype, right.dtype)
    left, right = left.to(dtype), right.to(dtype)
    error = gram_error(left) + gram_error(right)
    if uses_kernels(left):
        from hush.gradients.kernels.product_kernel import compare_grams as on_tensor_cores

        sums = on_tensor_cores(left, right).sum(2)
        return GramSquares(sums, 1.01 * error, _UNDERFLOW[torch.float32])
    chunks = gram_chunks(len(left), left.shape[1])
    return compare_grams([(gram(left[rows]), gram(right[rows])) for rows in chunks], error)


def gram_chunks(records: int, positions: int) -> Iterator[slice]:
    """Slices of records whose Gram matrices fit in memory."""
    step = max(1, _GRAM_ENTRIES // max(1, positions**2))
    return (slice(start, start + step) for start in range(0, max(1, records), step))


def compare_grams(pairs: Iterable[tuple[Tensor, Tensor]], error: float) -> GramSquares:
    """Squared norms from pairs of Gram matrices of consecutive chunks.

    Args:
        pairs: Gram matrices of the left and right factors, by chunk.
        error: Sum of the errors of both Gram matrices.
    """
    parts = []
    for left, right in pairs:
        first, second = (
            part.diagonal(dim1=1, dim2=2).clamp(min=0).double().sqrt() for part in (left, right)
        )
        squares = (left * right).sum((1, 2), dtype=torch.float64)
        parts.append(torch.stack([squares, (first * second).sum(1), (first + second).sum(1)]))
    return GramSquares(torch.cat(parts, 1), 1.01 * error, _UNDERFLOW[left.dtype])


def weighted_products(left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over records of `sum_t left[t] (x) right[t]`, in double precision.

    A record of weight 0 adds exactly zero, even if its factors are not finite.
    """
    dtype = torch.promote_types(left.dtype, right.dtype)
    left, right = left.to(dtype), right.to(dtype)
    if not uses_kernels(left):
        return record_products(precise(left), precise(right), weights)
    from hush.gradients.kernels.product_kernel import split_halves, weighted_block_sums

    halves = dtype == torch.float32
    if halves:
        left, right = split_halves(left.contiguous()), split_halves(right.contiguous())
    blocks = weighted_block_sums(left, right, weights.float(), SUM_BLOCK, halves=halves)
    return blocks.sum(0, dtype=torch.float64)


def record_gradients(left: Tensor, right: Tensor) -> Tensor:
    """Per-sample gradients `sum_t left[t] (x) right[t]`: (records, rows, columns).

    They are computed in at least single precision.
    """
    if left.is_cuda and left.dtype in _HALF and left.dtype == right.dtype:
        return torch.bmm(left.mT, right, out_dtype=torch.float32)
    left, right = precise(left), precise(right)
    if left.is_cuda or left.is_contiguous() or left.mT.is_contiguous():
        return left.mT @ right
    # copying strided rows to the cache first halves the time
    gradients = left.new_empty(len(left), left.shape[2], right.shape[2])
    step = max(1, _COPIED // left[0].numel())
    for part, *factors in zip(*(t.split(step) for t in (gradients, left, right)), strict=True):
        a, b = (factor.contiguous() for factor in factors)
        torch.bmm(a.mT, b, out=part)
    return gradients


def gradients_in_runs(left: Tensor, right: Tensor) -> Tensor:
    """`record_gradients` with an error of at most `product_error`.

    The error of tensor cores grows with the number of additions, so a GPU processes a few positions at a
    time.
    """
    if not uses_kernels(left):
        return record_gradients(left, right)
    from hush.gradients.kernels.product_kernel import SUM_RUN

    runs = zip(left.split(SUM_RUN, 1), right.split(SUM_RUN, 1), strict=True)
    total = record_gradients(*next(runs))
    for run in runs:
        total += record_gradients(*run)
    return total


def product_error(factor: Tensor) -> float:
    """Error of a record's product in `weighted_products`, relative to its length."""
    positions = factor.shape[1]
    if not uses_kernels(factor):
        return (positions + 2) * (2.0**-53 if factor.dtype == torch.float64 else 2.0**-24)
    from hush.gradients.kernels.product_kernel import SUM_RUN

    left_out = 0.0 if factor.dtype in _HALF else _HALVES
    run = min(positions, SUM_RUN)
    return left_out + 1.02 * (run + 4) * _TENSOR_CORE + (2 * positions / SUM_RUN + 4) * 2.0**-24
