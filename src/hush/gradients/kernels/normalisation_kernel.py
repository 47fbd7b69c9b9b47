"""Gradients of normalisation layers, in Triton.

The per-sample gradients of scale and shift are two sums over positions. One pass over output gradient
and input computes both. For a group norm, a second pass computes the input gradient from these sums.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

_ENTRIES = 2048
"""Number of entries that a program loads at a time."""

_WIDE = 128
"""Number of columns that a program sums over positions."""


def column_gradients(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Per-sample gradients of a layer norm's scale and shift: (2, records, columns).

    Gradients are in single precision. `grad` and `x` have shape (records, positions, columns). `mean`
    and `scale` (the normalisation factor) have one number per position. All tensors must be contiguous.
    """
    records, positions, columns = x.shape
    out = x.new_empty(2, records, columns, dtype=torch.float32)
    if not out.numel():
        return out
    with torch.cuda.device(x.device):
        _column_gradients[(records, triton.cdiv(columns, _WIDE))](
            grad, x, mean, scale, out, records, positions, columns, _ENTRIES // _WIDE, _WIDE, num_warps=4
        )
    return out


def channel_gradients(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, groups: int) -> Tensor:
    """Gradients of a group norm's scale and shift: (2, images, channels), in single precision.

    `grad` and `x` have shape (images, channels, *positions). `mean` and `scale` have shape (images,
    groups). All tensors must be contiguous.
    """
    images, channels = x.shape[:2]
    positions, rows = x.shape[2:].numel(), images * channels
    out = x.new_empty(2, images, channels, dtype=torch.float32)
    if not x.numel():
        return out.zero_()
    run = min(_ENTRIES, triton.next_power_of_2(positions))
    high = _ENTRIES // run
    with torch.cuda.device(x.device):
        _channel_gradients[(triton.cdiv(rows, high),)](
            grad, x, mean, scale, out, rows, positions, channels // groups, high, run, num_warps=4
        )
    return out


def input_gradient(
    grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor, by_channel: Tensor, groups: int
) -> Tensor:
    """Gradient of a group norm's input, with the shape and dtype of the input."""
    out = torch.empty_like(x)
    if not out.numel():
        return out
    (images, channels), positions = x.shape[:2], x.shape[2:].numel()
    rows, size = images * channels, channels // groups
    most = triton.next_power_of_2(size)
    run = min(_ENTRIES, triton.next_power_of_2(positions))
    high = max(1, _ENTRIES // max(run, most))
    with torch.cuda.device(x.device):
        _input_gradient[(triton.cdiv(rows, high), triton.cdiv(positions, run))](
            *(grad, x, mean, scale, weight, by_channel, out, rows, positions, channels, size),
            *(most, high, run),
            num_warps=4,
        )
    return out


@triton.jit
def _column_gradients(
    grad, x, mean, scale, out, records, positions, columns, run: tl.constexpr, wide: tl.constexpr
):
    record = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * wide + tl.arange(0, wide)
    shift = tl.zeros((run, wide), dtype=tl.float32)
    product = tl.zeros((run, wide), dtype=tl.float32)
    for start in range(0, positions, run):
        t = start + tl.arange(0, run)
        row = record * positions + t
        center = tl.load(mean + row, mask=t < positions, other=0.0).to(tl.float32)[:, None]
        factor = tl.load(scale + row, mask=t < positions, other=0.0).to(tl.float32)[:, None]
        inside = (t < positions)[:, None] & (n < columns)[None, :]
        place = row[:, None] * columns + n[None, :]
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        shift += g
        product += g * ((value - center) * factor)
    tl.store(out + record * columns + n, tl.sum(product, 0), mask=n < columns)
    tl.store(out + (records + record) * columns + n, tl.sum(shift, 0), mask=n < columns)


@triton.jit
def _channel_gradients(
    grad, x, mean, scale, out, rows, positions, size, high: tl.constexpr, run: tl.constexpr
):
    row = tl.program_id(0) * high + tl.arange(0, high)
    present = row < rows
    group = row // size
    center = tl.load(mean + group, mask=present, other=0.0).to(tl.float32)[:, None]
    shift = tl.zeros((high, run), dtype=tl.float32)
    product = tl.zeros((high, run), dtype=tl.float32)
    for start in range(0, positions, run):
        t = start + tl.arange(0, run)
        inside = present[:, None] & (t < positions)[None, :]
        place = row[:, None].to(tl.int64) * positions + t[None, :]
        g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        shift += g
        product += g * (value - center)
    factor = tl.load(scale + group, mask=present, other=0.0).to(tl.float32)
    tl.store(out + row, tl.sum(product, 1) * factor, mask=present)
    tl.store(out + rows + row, tl.sum(shift, 1), mask=present)


@triton.jit
def _input_gradient(
    grad, x, mean, scale, weight, by_channel, out, rows, positions, channels, size,
    most: tl.constexpr, high: tl.constexpr, run: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * high + tl.arange(0, high)
    present = row < rows
    group = row // size
    # group means: gradient of the normalised input (level), and its product with this input (along)
    channel = tl.arange(0, most)
    beside = group[:, None] * size + channel[None, :]
    inside = present[:, None] & (channel < size)[None, :]
    factors = tl.load(weight + beside % channels, mask=inside, other=0.0).to(tl.float32)
    products = tl.load(by_channel + beside, mask=inside, other=0.0)
    shifts = tl.load(by_channel + rows + beside, mask=inside, other=0.0)
    along = tl.sum(products * factors, 1) / (size * positions)
    level = tl.sum(shifts * factors, 1) / (size * positions)
    center = tl.load(mean + group, mask=present, other=0.0).to(tl.float32)
    factor = tl.load(scale + group, mask=present, other=0.0).to(tl.float32)
    own = tl.load(weight + row % channels, mask=present, other=0.0).to(tl.float32)
    t = tl.program_id(1) * run + tl.arange(0, run)
    inside = present[:, None] & (t < positions)[None, :]
    place = row[:, None].to(tl.int64) * positions + t[None, :]
    g = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    normalised = (value - center[:, None]) * factor[:, None]
    result = (own[:, None] * g - level[:, None] - normalised * along[:, None]) * factor[:, None]
    tl.store(out + place, result, mask=inside)
