"""Gram matrices of records' positions on a GPU, in Triton: loaded only where there is one.

They multiply on tensor cores, in half precision or TensorFloat-32, and add in single precision in an
order that is written here, so that its rounding is known (docs/guarantees/tape.md, 5).
"""

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from hush.gradients.kernels.descriptors import describe

if TYPE_CHECKING:
    from torch import Tensor

GRAM_RUN = {2: 64, 4: 32}
"""Entries that a Gram matrix multiplies and adds on tensor cores at once, by bytes an entry."""


def gram(factor: "Tensor") -> "Tensor":
    """The Gram matrix of each record's positions, (records, positions, positions), in single precision.

    Args:
        factor: (records, positions, entries), in half precision or single.
    """
    import torch

    records, positions, _ = factor.shape
    size, tiles, alone = _tiles(factor)
    out = factor.new_empty(records, positions, positions, dtype=torch.float32)
    run = GRAM_RUN[factor.element_size()]
    with torch.cuda.device(factor.device):
        _gram[(records, tiles * (tiles + 1) // 2)](
            describe(factor, size, run),
            out,
            positions,
            factor.shape[2],
            tiles,
            size,
            run,
            alone,
            num_warps=size // 16,
            num_stages=3,
        )
    return out


def compare_grams(left: "Tensor", right: "Tensor") -> "Tensor":
    """Of the Gram matrices of two factors: (3, records, tiles) parts of sums in double precision.

    The sum of the product of the two matrices, and of the products and the sums of the roots of their
    diagonals. Nothing is written out.

    Args:
        left: (records, positions, rows), in half precision or single.
        right: (records, positions, columns), of the same precision.
    """
    import torch

    size, tiles, alone = _tiles(left)
    out = left.new_empty(3, len(left), tiles * (tiles + 1) // 2, dtype=torch.float64)
    run = GRAM_RUN[left.element_size()]
    with torch.cuda.device(left.device):
        _compare[(len(left), out.shape[2])](
            describe(left, size, run),
            describe(right, size, run),
            out,
            left.shape[2],
            right.shape[2],
            tiles,
            size,
            run,
            alone,
            num_warps=size // 16,
            num_stages=3,
        )
    return out


def _tiles(factor: "Tensor") -> tuple[int, int, bool]:
    """Positions of a tile, the number of tiles, and whether there is one alone."""
    positions = factor.shape[1]
    size = 128 if positions > 64 and factor.element_size() == 2 else 64
    tiles = triton.cdiv(positions, size)
    return size, tiles, tiles == 1


@triton.jit
def _place(tiles):
    """Row and column of a tile among those on and above the diagonal."""
    across = tl.program_id(1)
    down = 0
    while across >= tiles - down:
        across -= tiles - down
        down += 1
    return down, down + across


@triton.jit
def _gram_tile(
    factor, record, top, side, entries, size: tl.constexpr, run: tl.constexpr, alone: tl.constexpr
):
    total = tl.zeros((size, size), dtype=tl.float32)
    for start in range(0, entries, run):
        a = factor.load([record, top, start]).reshape(size, run)
        b = a if alone else factor.load([record, side, start]).reshape(size, run)
        # a product of its own for each run: what tensor cores lose grows with what they add
        if a.dtype == tl.float32:
            total += tl.dot(a, tl.trans(b), input_precision="tf32x3")
        else:
            total += tl.dot(a, tl.trans(b))
    return total


@triton.jit
def _gram(
    factor,
    out,
    positions,
    entries,
    tiles,
    size: tl.constexpr,
    run: tl.constexpr,
    alone: tl.constexpr,
):
    down, across = _place(tiles)
    record = tl.program_id(0)
    values = _gram_tile(factor, record, down * size, across * size, entries, size, run, alone)
    s = down * size + tl.arange(0, size)
    t = across * size + tl.arange(0, size)
    # the square of the positions may be beyond 2**31
    base = out + record.to(tl.int64) * positions * positions
    inside = (s < positions)[:, None] & (t < positions)[None, :]
    tl.store(base + s[:, None].to(tl.int64) * positions + t[None, :], values, mask=inside)
    if across != down:
        tl.store(base + t[None, :].to(tl.int64) * positions + s[:, None], values, mask=inside)


@triton.jit
def _compare(
    left,
    right,
    out,
    rows,
    columns,
    tiles,
    size: tl.constexpr,
    run: tl.constexpr,
    alone: tl.constexpr,
):
    down, across = _place(tiles)
    record = tl.program_id(0)
    left_gram = _gram_tile(left, record, down * size, across * size, rows, size, run, alone)
    right_gram = _gram_tile(right, record, down * size, across * size, columns, size, run, alone)
    square = tl.sum(tl.sum(left_gram.to(tl.float64) * right_gram.to(tl.float64), 1), 0)
    s = down * size + tl.arange(0, size)
    t = across * size + tl.arange(0, size)
    diagonal = s[:, None] == t[None, :]
    # clamped: rounding may have left a square below zero
    left_norms = tl.sum(tl.where(diagonal, left_gram, 0.0), 1)
    right_norms = tl.sum(tl.where(diagonal, right_gram, 0.0), 1)
    left_norms = tl.sqrt(tl.where(left_norms < 0, 0.0, left_norms).to(tl.float64))
    right_norms = tl.sqrt(tl.where(right_norms < 0, 0.0, right_norms).to(tl.float64))
    place = out + record.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    step = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(place, tl.where(down == across, square, 2 * square))
    tl.store(place + step, tl.sum(left_norms * right_norms, 0))
    tl.store(place + 2 * step, tl.sum(left_norms + right_norms, 0))
