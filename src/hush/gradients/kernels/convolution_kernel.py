"""Per-sample weight gradients of convolutions, in Triton.

A record's gradient is one matrix product: (out, positions) by (positions, in * kernel). The right
factor, the matrix of input patches, is not materialised (implicit GEMM). The input is unfolded along its
width only, which makes each column of this matrix contiguous. A program computes one tile of a record's
gradient, and either its squared norm or a weighted sum over records. Materialised gradients, norms and
sums use the same program, so they agree in any precision (docs/guarantees/tape.md, 5).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor
from triton import language as tl

if TYPE_CHECKING:
    from hush.gradients.rules.convolution import ConvolutionShape


_PROGRAMS = 1056
"""Target number of programs: eight per multiprocessor of a large GPU."""

_UNFOLDED = 2**28
"""Maximum number of entries of unfolded inputs in memory."""

_RECORDS = 2**15
"""Maximum number of records per launch; a GPU supports up to 2**16 rows of programs."""


def weighted_block_sums(
    grad: Tensor, x: Tensor, weights: Tensor, geometry: "ConvolutionShape", most: int, *, tf32: bool
) -> Tensor:
    """Weighted sums of gradients over blocks of at most `most` records: (blocks, *shape).

    Sums are in single precision. Blocks of one record with weight 1 are the materialised gradients.
    Gradients of weight 0 are ignored.

    Args:
        grad: Output gradients of shape (records, out, *positions), with one or two spatial dimensions.
        x: Inputs of shape (records, in, *sizes), in half or single precision, of the same dtype.
        weights: Weights of shape (records,), in single precision.
        geometry: Shape of a convolution with one group.
        most: Maximum number of records per block.
        tf32: Whether single precision products may use TensorFloat-32.
    """
    parts = []
    for rows, work in _chunks(grad, x, geometry, tf32):
        per_block = min(most, work.per_block)
        out = weights.new_empty(triton.cdiv(len(work.grad), per_block), *geometry.shape)
        unused = weights.new_empty(1, dtype=torch.float64)
        work.run(weights[rows], out, unused, per_block, measuring=False)
        parts.append(out)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def squared_norms(grad: Tensor, x: Tensor, geometry: "ConvolutionShape", *, tf32: bool) -> Tensor:
    """Squared Euclidean norms of the gradients in `weighted_block_sums`, in double precision."""
    parts = []
    unused = x.new_empty(1, dtype=torch.float32)
    for _, work in _chunks(grad, x, geometry, tf32):
        squares = x.new_empty(len(work.grad), work.tile[4], dtype=torch.float64)
        work.run(unused, unused, squares, work.per_block, measuring=True)
        parts.append(squares.sum(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, eq=False)
class _Work:
    """Operands of the kernel for a chunk of records, with the same tiles for norms and sums."""

    grad: Tensor
    """(records, out, height, pitch), with rows padded to a multiple of 4 numbers."""
    unfolded: Tensor
    """Result of `unfold_width`: (records, kernel width, phases, in, rows, pitch)."""
    kernel: tuple[int, ...]
    """Height and width of the kernel."""
    columns: int
    """Number of columns of the gradient as a matrix: in * kernel."""
    stride: int
    dilation: int
    tf32: bool

    @property
    def tile(self) -> tuple[int, int, int, int, int]:
        """Height and width of a program's tile, positions per product, warps, and number of tiles."""
        rows, columns = self.grad.shape[1], self.columns
        high = 128 if rows > 64 else 64
        wide = 64 if columns <= 64 or (high == 64 and -columns % 128 > columns // 8) else 128
        warps = 8 if high == wide == 128 else 4
        tiles = int(triton.cdiv(rows, high) * triton.cdiv(columns, wide))
        return high, wide, 128 // self.grad.element_size(), warps, tiles

    @property
    def per_block(self) -> int:
        """Number of records per program."""
        return max(1, int(triton.cdiv(len(self.grad), triton.cdiv(_PROGRAMS, self.tile[4]))))

    def run(
        self, weights: Tensor, out: Tensor, squares: Tensor, per_block: int, *, measuring: bool
    ) -> None:
        records, rows, height, pitch = self.grad.shape
        if not records:
            return
        high, wide, run, warps, tiles = self.tile
        phases, channels, tall = self.unfolded.shape[2:5]
        with torch.cuda.device(self.grad.device):
            _weighted_sum[(tiles, triton.cdiv(records, per_block))](
                *(self.grad, self.unfolded, weights, out, squares, records, per_block),
                *(triton.cdiv(height * pitch, run), int(measuring), rows, self.columns),
                *(height, phases, channels, tall, self.unfolded.shape[5] // 4),
                *(*self.kernel, self.stride, self.dilation, high, wide, run),
                "tf32" if self.tf32 else "tf32x3",
                num_warps=warps,
                num_stages=3,
            )


def _chunks(
    grad: Tensor, x: Tensor, geometry: "ConvolutionShape", tf32: bool
) -> Iterator[tuple[slice, _Work]]:
    """Slices of records and their operands, with at most `_UNFOLDED` entries each."""
    given = geometry.shape[2:], geometry.stride, geometry.padding, geometry.dilation
    kernel, stride, padding, dilation = (
        tuple(values) if len(values) == 2 else (alone, *values)
        for alone, values in zip((1, 1, 0, 1), given, strict=True)
    )
    pointwise = kernel == stride == (1, 1) and not any(padding)
    if pointwise or x.dim() == 3:
        grad, x = grad.flatten(2).unsqueeze(2), x.flatten(2).unsqueeze(2)
    fill = -grad.shape[3] % 4
    pitch = grad.shape[3] + fill
    tall = grad.shape[2] + (dilation[0] * (kernel[0] - 1)) // stride[0]
    # omit rows that the kernel does not use
    phases = min(stride[0], dilation[0] * (kernel[0] - 1) + 1)
    columns = x.shape[1] * kernel[0] * kernel[1]
    size = kernel[1] * phases * x.shape[1] * tall * pitch
    step = max(1, min(_RECORDS, _UNFOLDED // size))
    for start in range(0, max(1, len(x)), step):
        rows = slice(start, start + step)
        grads, inputs = grad[rows].contiguous(), x[rows].contiguous()
        shape = (len(inputs), kernel[1], phases, x.shape[1], tall, pitch)
        if pointwise and not fill:
            unfolded = inputs.view(shape)
        else:
            unfolded = unfold_width(inputs, shape, grad.shape[3], stride, padding, dilation[1])
        if fill:
            filled = (len(grads), 1, 1, *grads.shape[1:3], pitch)
            grads = unfold_width(grads, filled, grad.shape[3], (1, 1), (0, 0), 1)[:, 0, 0]
        yield rows, _Work(grads, unfolded, kernel, columns, stride[0], dilation[0], tf32)


# one compiled program for all uses, without specialisation on block sizes or alignment
@triton.jit(
    do_not_specialize=["records", "per_block", "runs", "measuring"],
    do_not_specialize_on_alignment=["weights"],
)
def _weighted_sum(
    grad, unfolded, weights, out, squares, records, per_block, runs, measuring, rows, columns,
    output_height, phases, channels, height, quarter, kernel_height, kernel_width, stride, dilation,
    high: tl.constexpr, wide: tl.constexpr, run: tl.constexpr, precision: tl.constexpr,
):  # fmt: skip
    pitch = quarter * 4  # lets the compiler load four numbers at a time
    positions = output_height * pitch
    tall = tl.cdiv(rows, high)
    m = (tl.program_id(0) % tall) * high + tl.arange(0, high)
    n = (tl.program_id(0) // tall) * wide + tl.arange(0, wide)
    t = tl.arange(0, run)
    block = tl.program_id(1).to(tl.int64)
    first = tl.program_id(1) * per_block
    last = tl.minimum(first + per_block, records)
    # start of a column's pixels, from its kernel position and channel
    down = (n // kernel_width) % kernel_height * dilation
    copy = (n % kernel_width) * phases + down % stride
    channel = n // (kernel_width * kernel_height)
    column = ((copy * channels + channel) * height + down // stride) * pitch
    left = m[:, None] * positions + t[None, :]
    right = column[:, None] + t[None, :]
    total = tl.zeros((high, wide), dtype=tl.float32)
    own = tl.zeros((high, wide), dtype=tl.float32)
    for step in range(first * runs, last * runs):
        record = step // runs
        start = (step - record * runs) * run
        inside = (t < positions - start)[None, :]
        image = grad + record.to(tl.int64) * rows * positions + start
        a = tl.load(image + left, mask=inside & (m < rows)[:, None], other=0.0)
        image = unfolded + record.to(tl.int64) * kernel_width * phases * channels * height * pitch
        b = tl.load(image + start + right, mask=inside & (n < columns)[:, None], other=0.0)
        own = tl.dot(a, tl.trans(b), own, input_precision=precision)
        if start + run >= positions:
            if measuring:
                square = tl.sum(tl.sum(own * own, 1), 0).to(tl.float64)
                if square > 3e38:
                    # the square may overflow in single precision although the norm is finite
                    small = own * 2.0**-80
                    square = tl.sum(tl.sum(small * small, 1), 0).to(tl.float64) * 2.0**160
                place = record.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
                tl.store(squares + place, square)
            else:
                weight = tl.load(weights + record)
                # records of weight 0 may not be finite
                total += tl.where(weight != 0, own * weight, 0.0)
            own = tl.zeros((high, wide), dtype=tl.float32)
    if measuring == 0:
        place = (block * rows + m[:, None]) * columns + n[None, :]
        tl.store(out + place, total, mask=(m < rows)[:, None] & (n < columns)[None, :])


_COPIED = 2048
"""Number of entries that a program unfolds."""


def unfold_width(
    x: Tensor,
    shape: tuple[int, ...],
    outputs: int,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: int,
) -> Tensor:
    """Unfold the input along its width: input pixels under each kernel column, by output column.

    Rows are grouped by phase (row number modulo the stride). Therefore the rows under one kernel row are
    contiguous, and the entries of the input patches at one kernel position are also contiguous.

    Args:
        x: (images, in, height, width), contiguous.
        shape: Shape of the result, (images, kernel width, phases, in, rows, columns). The number of
            columns is padded with zeros to a multiple of 4.
        outputs: Number of output columns.
        stride, padding: Stride and padding of the convolution.
        dilation: Dilation along the width.
    """
    out = x.new_empty(shape)
    images, kernel_width, phases, channels, rows, pitch = shape
    wide = min(_COPIED, triton.next_power_of_2(pitch))
    high = _COPIED // wide
    tiles = triton.cdiv(channels * rows, high) * triton.cdiv(pitch, wide)
    if out.numel():
        with torch.cuda.device(x.device):
            _copy_columns[(tiles, kernel_width * phases, images)](
                *(x, out, channels, *x.shape[2:], rows, pitch // 4, phases, outputs),
                *(*stride, *padding, dilation, high, wide),
                num_warps=4,
            )
    return out


@triton.jit
def _copy_columns(
    x, out, channels, height, width, rows, quarter, phases, outputs, stride_down, stride_across,
    padding_down, padding_across, dilation, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    pitch = quarter * 4  # lets the compiler store four numbers at a time
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
    # columns first, because the compiler assigns neighbouring threads to the first dimension
    mask = inside[None, :] & ((t < outputs) & (w >= 0) & (w < width))[:, None]
    start = channel * (height * width) + h * width
    first = x + image * channels * height * width
    value = tl.load(first + (start[None, :] + w[:, None]), mask=mask, other=0.0)
    base = out + (image * tl.num_programs(1) + tl.program_id(1)) * (channels * rows) * pitch
    mask = (q < channels * rows)[None, :] & (t < pitch)[:, None]
    tl.store(base + (q[None, :] * pitch + t[:, None]), value, mask=mask)
