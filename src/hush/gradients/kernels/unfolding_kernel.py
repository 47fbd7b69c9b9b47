"""Inputs of convolutions unfolded along their width, on a GPU: loaded only where there is one."""

from typing import TYPE_CHECKING

import triton
from triton import language as tl

if TYPE_CHECKING:
    from torch import Tensor

_COPIED = 2048
"""Entries that a program unfolds."""


def unfold_width(
    x: "Tensor",
    shape: tuple[int, ...],
    outputs: int,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: int,
) -> "Tensor":
    """The pixels that each column of a convolution's kernel sees, by output column.

    Of the rows every stride-th is by itself, so that those that one row of the kernel sees lie side by
    side: the input patches' entries at one place of the kernel are a run of numbers, position by
    position.

    Args:
        x: (images, in, height, width), contiguous.
        shape: of what is returned, (images, kernel width, phases, in, rows, output columns): of the
            rows of phase p, those that are p more than a multiple of the stride. Output columns
            beyond the last are zero, and make a multiple of 4.
        outputs: output columns that there are.
        stride: down and across.
        padding: down and across.
        dilation: across.
    """
    import torch

    out = x.new_empty(shape)
    images, kernel_width, phases, channels, rows, pitch = shape
    wide = min(_COPIED, triton.next_power_of_2(pitch))
    high = _COPIED // wide
    tiles = triton.cdiv(channels * rows, high) * triton.cdiv(pitch, wide)
    if out.numel():
        with torch.cuda.device(x.device):
            _copy_columns[(tiles, kernel_width * phases, images)](
                x,
                out,
                channels,
                x.shape[2],
                x.shape[3],
                rows,
                pitch // 4,
                phases,
                outputs,
                *stride,
                *padding,
                dilation,
                high,
                wide,
                num_warps=4,
            )
    return out


@triton.jit
def _copy_columns(
    x,
    out,
    channels,
    height,
    width,
    rows,
    quarter,
    phases,
    outputs,
    stride_down,
    stride_across,
    padding_down,
    padding_across,
    dilation,
    high: tl.constexpr,
    wide: tl.constexpr,
):
    pitch = quarter * 4  # so that the compiler knows: numbers are stored four at a time
    across = tl.cdiv(pitch, wide)
    q = (tl.program_id(0) // across) * high + tl.arange(0, high)
    t = (tl.program_id(0) % across) * wide + tl.arange(0, wide)
    phase = tl.program_id(1) % phases
    offset = tl.program_id(1) // phases
    image = tl.program_id(2).to(tl.int64)
    channel = q // rows
    h = (q - channel * rows) * stride_down + phase - padding_down
    w = t * stride_across + offset * dilation - padding_across
    inside = (q < channels * rows) & (h >= 0) & (h < height)
    # columns first: of two dimensions that are not contiguous, the compiler gives neighbours the first
    mask = inside[None, :] & ((t < outputs) & (w >= 0) & (w < width))[:, None]
    start = channel * (height * width) + h * width
    value = tl.load(
        x + image * channels * height * width + (start[None, :] + w[:, None]), mask=mask, other=0.0
    )
    base = out + (image * tl.num_programs(1) + tl.program_id(1)) * (channels * rows) * pitch
    mask = (q < channels * rows)[None, :] & (t < pitch)[:, None]
    tl.store(base + (q[None, :] * pitch + t[:, None]), value, mask=mask)
