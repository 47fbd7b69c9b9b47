"""Norms of per-sample gradients and sums over records, with a bounded rounding error.

All results are in single precision at least: a sum rounded to half precision can jump by many clipping
norms when one record joins it. Sums over records are accumulated in double precision, from
products of at most `SUM_BLOCK` records each (docs/guarantees/tape.md, 5 and 6).
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import product

import numpy as np
import torch
from torch import Tensor

SUM_BLOCK = 128
"""Records summed in single precision; the sums of such blocks are added in double precision."""

_TILE = 2**18
"""Entries of a sum that are computed at once on a CPU, in the cache."""

_PRODUCTS = 2**26
"""Entries of records' products that are materialised at once on a GPU without kernels of its own."""

NORM_RUN = 1024
"""Entries of a gradient whose norm is taken in their own precision."""

_CONVERTED = 2**20
"""Entries that are converted to double precision at once on a CPU, in the cache."""


@contextmanager
def full_precision(device: torch.device, *, autograd: bool = False) -> Iterator[None]:
    """Context without autocast, TensorFloat-32 and, on a CPU, bfloat16 in products of floats.

    They would round sums. Autograd is off unless `autograd` is True.
    """
    cast, cudnn = torch.is_autocast_enabled(device.type), torch.backends.cudnn
    # of matrix products on all devices; cuda.matmul.allow_tf32 is another name for it
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
    """The dtype of autocast's matrix products with these values; their own if autocast is off."""
    kind, dtype = values.device.type, values.dtype
    if torch.is_autocast_enabled(kind) and dtype in _AUTOCAST_FROM:
        return torch.get_autocast_dtype(kind)
    return dtype


def to_autocast_dtype(values: Tensor) -> Tensor:
    """The values in the dtype of autocast's matrix products, if autocast is on."""
    return values.to(autocast_dtype(values))


_PRECISE = (torch.float32, torch.float64)
_AUTOCAST_FROM = (torch.float32, torch.float16, torch.bfloat16)


def precise_under_autocast(values: Tensor) -> Tensor:
    """The values in single precision at least if autocast is on; unchanged otherwise."""
    low = values.dtype in (torch.float16, torch.bfloat16)
    return values.float() if low and torch.is_autocast_enabled(values.device.type) else values


def precise(values: Tensor) -> Tensor:
    """The values in single precision at least."""
    return values if values.dtype in _PRECISE else values.to(precise_dtype(values))


def precise_dtype(values: Tensor) -> torch.dtype:
    """The dtype of `precise` values."""
    return torch.promote_types(values.dtype, torch.float32)


def double_norms(values: Tensor, order: float) -> Tensor:
    """The l_order norms over the last dimension, in double precision.

    torch converts all of the values before it adds them up: on a CPU a few rows at a time, which stay in
    the cache.
    """
    if not values.shape[-1]:  # torch has no maximum of nothing
        return values.new_zeros(values.shape[:-1], dtype=torch.float64)
    if values.device.type != "cpu" or values.numel() <= _CONVERTED:
        return torch.linalg.vector_norm(values, order, -1, dtype=torch.float64)  # type: ignore[no-any-return]
    parts = values.reshape(-1, values.shape[-1]).split(max(1, _CONVERTED // values.shape[-1]))
    norms = [torch.linalg.vector_norm(part, order, -1, dtype=torch.float64) for part in parts]
    return torch.cat(norms).view(values.shape[:-1])


def vector_norms(values: Tensor, order: float) -> Tensor:
    """The l_order norm over all dimensions but the first.

    Single precision loses several per cent over millions of entries. The norm of a long row is therefore
    the norm in double precision of the norms of its runs. For orders other than 1, 2 and infinity the
    entries are first divided by the largest one: powers that underflow then do not matter.
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
    # A gradient with a square that overflows in single precision is clipped to nearly zero; an infinite
    # norm would make it exactly zero.
    if rows.dtype != torch.float64 and not capturing_cuda_graph():
        finite = norms.isfinite()
        if not bool(finite.all()):
            overflowed = ~finite
            norms = norms.double()
            norms[overflowed] = double_norms(rows[overflowed], order)
    return norms.to(values.dtype)


def _norms_in_runs(rows: Tensor, order: float) -> Tensor:
    """The l_order norms of rows in double precision, from norms of runs in the precision of the rows."""
    count = rows.shape[1] // NORM_RUN
    whole = count * NORM_RUN
    runs = rows[:, :whole].unflatten(1, (count, NORM_RUN)), rows[:, whole:].unsqueeze(1)
    sizes = [torch.linalg.vector_norm(run, ord=order, dim=2) for run in runs if run.shape[1:].numel()]
    return double_norms(torch.cat(sizes, dim=1), order)


def blocked_product(left: Tensor, right: Tensor) -> Tensor:
    """left.T @ right in double precision, from products of `SUM_BLOCK` rows each in their own.

    The rounding error of one block bounds that of the sum. On a CPU the result is computed tile by tile:
    each product is added while it is in the cache.
    """
    if left.is_cuda:  # the products of all blocks at once, and then their sum
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
                # numpy converts the part as it adds; torch would write it in double precision first
                np.add(tile.numpy(), part.numpy(), out=tile.numpy())
            else:
                tile.copy_(part)
    return total


def record_products(left: Tensor, right: Tensor, weights: Tensor) -> Tensor:
    """The sum over records of weight times left.T @ right, with a separate product for each record.

    Products, and sums of `SUM_BLOCK` products, are in the precision of the factors. Blocks are added in
    double precision. A record of weight 0 adds exactly zero, for any factors.
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
    """Tiles of a sum, memory for the addend of each in the precision of `like`, and their places."""
    wide = max(1, min(total.shape[1], _TILE))
    high = max(1, _TILE // wide)
    memory = like.new_empty(min(high * wide, total.numel()))
    for top, first in product(range(0, len(total), high), range(0, total.shape[1], wide)):
        place = slice(top, top + high), slice(first, first + wide)
        tile = total[place]
        yield tile, memory[: tile.numel()].view(tile.shape), place


def capturing_cuda_graph() -> bool:
    """Whether a CUDA graph is being captured: no branch may depend on a value then.

    A norm that needs another computation is NaN in a graph. A replay with such a norm is discarded and
    computed without the graph.
    """
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
