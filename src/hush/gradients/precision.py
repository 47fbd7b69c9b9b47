"""Norms of per-sample gradients and sums over records, with bounded rounding errors.

Results have at least single precision: if a sum is rounded to half precision, adding one record can
change the rounding error by many clipping norms. Sums over records are accumulated in double precision,
from products of at most `SUM_BLOCK` records each (docs/guarantees/tape.md, 5 and 6).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product

import numpy as np
import torch
from torch import Tensor

SUM_BLOCK = 128
"""Number of records summed in single precision; block sums are accumulated in double precision."""

_TILE = 2**18
"""Number of entries of a sum computed at a time on a CPU, to fit its cache."""

_PRODUCTS = 2**26
"""Number of entries of products materialised at a time on a GPU without Triton kernels."""

NORM_RUN = 1024
"""Number of entries per partial norm, which is computed in the precision of the gradient."""

_CONVERTED = 2**20
"""Number of entries converted to double precision at a time on a CPU, to fit its cache."""


@contextmanager
def full_precision(device: torch.device, *, autograd: bool = False) -> Iterator[None]:
    """Context that disables autocast, TensorFloat-32 and, on a CPU, bfloat16 products of floats.

    Low precision would add rounding errors. Autograd is disabled unless `autograd` is True.
    """
    cast, cudnn = torch.is_autocast_enabled(device.type), torch.backends.cudnn
    # applies to matrix products on all devices; on a GPU it sets cuda.matmul.allow_tf32
    products = torch.get_float32_matmul_precision()
    convolutions = device.type == "cuda" and cudnn.allow_tf32
    with (
        torch.set_grad_enabled(autograd and torch.is_grad_enabled()),
        torch.autocast(device.type, enabled=False) if cast else nullcontext(),
    ):
        try:
            if products != "highest":
                torch.set_float32_matmul_precision("highest")
            if convolutions:
                cudnn.allow_tf32 = False
            yield
        finally:
            if products != "highest":
                torch.set_float32_matmul_precision(products)
            if convolutions:
                cudnn.allow_tf32 = True


def autocast_dtype(values: Tensor) -> torch.dtype:
    """Dtype that autocast uses for matrix products of these values."""
    kind, dtype = values.device.type, values.dtype
    if torch.is_autocast_enabled(kind) and dtype in _AUTOCAST_FROM:
        return torch.get_autocast_dtype(kind)
    return dtype


def to_autocast_dtype(values: Tensor) -> Tensor:
    """Cast the values to the dtype that autocast uses for matrix products."""
    return values.to(autocast_dtype(values))


_PRECISE = (torch.float32, torch.float64)
_AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)


def precise_under_autocast(values: Tensor) -> Tensor:
    """Cast half precision values to single precision if autocast is enabled."""
    low = values.dtype in (torch.float16, torch.bfloat16)
    return values.float() if low and torch.is_autocast_enabled(values.device.type) else values


def precise(values: Tensor) -> Tensor:
    """Cast the values to at least single precision."""
    return values if values.dtype in _PRECISE else values.to(precise_dtype(values))


def precise_dtype(values: Tensor) -> torch.dtype:
    """Dtype of `precise(values)`."""
    return torch.promote_types(values.dtype, torch.float32)


def double_norms(values: Tensor, order: float) -> Tensor:
    """l_order norms over the last dimension, in double precision.

    On a CPU, rows are processed in chunks that fit the cache, because torch first converts all values.
    """
    if not values.shape[-1]:  # torch's maximum does not support empty rows
        return values.new_zeros(values.shape[:-1], dtype=torch.float64)
    if values.device.type != "cpu" or values.numel() <= _CONVERTED:
        return torch.linalg.vector_norm(values, order, -1, dtype=torch.float64)  # type: ignore[no-any-return]
    parts = values.reshape(-1, values.shape[-1]).split(max(1, _CONVERTED // values.shape[-1]))
    norms = [torch.linalg.vector_norm(part, order, -1, dtype=torch.float64) for part in parts]
    return torch.cat(norms).view(values.shape[:-1])


def vector_norms(values: Tensor, order: float) -> Tensor:
    """l_order norms over all dimensions except the first.

    In single precision, the norm of millions of entries has an error of several per cent. The norm of a
    long row is therefore computed in double precision from partial norms. For orders other than 1, 2 and
    infinity, entries are first divided by the largest entry, which makes underflow negligible.
    """
    rows = values.reshape(values.shape[0], math.prod(values.shape[1:]))
    if rows.shape[1] == 0:
        return rows.new_zeros(len(rows))
    if order not in (1, 2, math.inf):
        largest: Tensor = torch.linalg.vector_norm(rows, ord=math.inf, dim=1, keepdim=True)
        largest = largest.clamp(min=torch.finfo(rows.dtype).tiny)
        return (largest[:, 0] * _norms_in_runs(rows / largest, order)).to(values.dtype)
    norms: Tensor
    if rows.shape[1] < NORM_RUN and rows.dtype != torch.float64:
        norms = torch.linalg.vector_norm(rows, ord=order, dim=1)  # one run
    else:
        norms = _norms_in_runs(rows, order)
    # A square may overflow in single precision although the norm is finite. An infinite norm would drop
    # the gradient, which should instead be clipped to the clipping norm.
    if rows.dtype != torch.float64 and not capturing_cuda_graph():
        finite = norms.isfinite()
        if not bool(finite.all()):
            overflowed = ~finite
            norms = norms.double()
            norms[overflowed] = double_norms(rows[overflowed], order)
    return norms.to(values.dtype)


def _norms_in_runs(rows: Tensor, order: float) -> Tensor:
    """l_order norms of rows in double precision, from partial norms in the precision of the rows."""
    count = rows.shape[1] // NORM_RUN
    whole = count * NORM_RUN
    runs = rows[:, :whole].unflatten(1, (count, NORM_RUN)), rows[:, whole:].unsqueeze(1)
    sizes = [torch.linalg.vector_norm(run, ord=order, dim=2) for run in runs if run.shape[1:].numel()]
    return double_norms(torch.cat(sizes, dim=1), order)


def blocked_product(left: Tensor, right: Tensor) -> Tensor:
    """left.T @ right in double precision, from products of `SUM_BLOCK` rows in the factors' precision.

    The relative rounding error of a block bounds the error of the sum. On a CPU the result is computed
    by tiles, to use the cache.
    """
    if left.is_cuda:  # compute all block products at once, then sum them
        whole = len(left) // SUM_BLOCK * SUM_BLOCK
        if not whole:
            return (left.mT @ right).double()
        first, second = (part[:whole].unflatten(0, (-1, SUM_BLOCK)) for part in (left, right))
        total: Tensor = (first.mT @ second).sum(0, dtype=torch.float64)
        return total.add_(left[whole:].mT @ right[whole:]) if whole < len(left) else total
    if left.shape[0] <= SUM_BLOCK and left.shape[1] * right.shape[1] <= _TILE:
        return left.mT.mm(right).double()
    total = torch.empty(left.shape[1], right.shape[1], dtype=torch.float64)
    for tile, part, (high, wide) in _tiles(total, left):
        for block in range(0, max(1, len(left)), SUM_BLOCK):
            rows = slice(block, block + SUM_BLOCK)
            torch.mm(left[rows, high].mT, right[rows, wide], out=part)
            if block:
                # NumPy converts while adding; torch would first create a copy in double precision
                np.add(tile.numpy(), part.numpy(), out=tile.numpy())
            else:
                tile.copy_(part)
    return total


def record_products(left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum over records of left.T @ right, with a separate product per record.

    Products, and sums of `SUM_BLOCK` products, are computed in the precision of the factors. Block sums
    are added in double precision. A record of weight 0 adds exactly zero, even if its factors are not
    finite.
    """
    shape = left.shape[2], right.shape[2]
    total = torch.zeros(shape, dtype=torch.float64, device=left.device)
    if left.is_cuda:
        step = max(1, _PRODUCTS // max(1, total.numel()))
        for start in range(0, len(left), step):
            rows = slice(start, start + step)
            scale = weights[rows, None, None].double()
            products = (left[rows].mT @ right[rows]) * scale
            total += products.where(scale != 0, 0.0).sum(0)
        return total
    scales = weights.tolist()
    for tile, part, (high, wide) in _tiles(total, left):
        for block in range(0, len(left), SUM_BLOCK):
            several = torch.zeros_like(part)
            for record, scale in enumerate(scales[block : block + SUM_BLOCK], start=block):
                if scale != 0:
                    torch.mm(left[record, :, high].mT, right[record, :, wide], out=part)
                    several.add_(part, alpha=scale)
            tile.add_(several)
    return total


def _tiles(total: Tensor, like: Tensor) -> Iterator[tuple[Tensor, Tensor, tuple[slice, slice]]]:
    """Tiles of a sum, buffers for their addends in the dtype of `like`, and the slices of each tile."""
    wide = max(1, min(total.shape[1], _TILE))
    high = max(1, _TILE // wide)
    memory = like.new_empty(min(high * wide, total.numel()))
    for top, first in product(range(0, len(total), high), range(0, total.shape[1], wide)):
        place = slice(top, top + high), slice(first, first + wide)
        tile = total[place]
        yield tile, memory[: tile.numel()].view(tile.shape), place


def capturing_cuda_graph() -> bool:
    """Whether a CUDA graph is being captured.

    Captured code must not branch on values. A norm that needs a branch is not finite in the graph, and
    its batch is then computed without the graph.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
