"""Gram matrices and weighted sums of outer products, in Triton.

Products use tensor cores in half precision or TensorFloat-32. Sums are computed in single precision in a
fixed order, which bounds the rounding error (docs/guarantees/tape.md, 5 and 6).
"""

from functools import lru_cache

import torch
import triton
from torch import Tensor, device
from triton import language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

_ALIGNMENT = 16
"""Alignment of rows in bytes."""


def describe(factor: Tensor, positions: int, entries: int) -> TensorDescriptor:
    """Tensor descriptor of a factor (records, positions, entries), for tiles of one record.

    The factor is copied if its rows are not aligned. Tiles are zero outside of the tensor.
    """
    records, length, width = factor.shape
    pitch = width + -width % (_ALIGNMENT // factor.element_size())
    if pitch != width or factor.data_ptr() % _ALIGNMENT or not factor.is_contiguous():
        rows = factor.new_empty(records, length, pitch)
        rows[:, :, :width] = factor
        factor = rows
    return TensorDescriptor(
        factor, [records, length, width], [length * pitch, pitch, 1], [1, positions, entries]
    )


GRAM_RUN = {2: 64, 4: 32}
"""Number of entries per tensor core product in Gram matrices, by bytes per entry."""


def gram(factor: Tensor) -> Tensor:
    """Gram matrix of each record's positions: (records, positions, positions), in float32."""
    records, positions, _ = factor.shape
    size, tiles, alone = _tiles(factor)
    out = factor.new_empty(records, positions, positions, dtype=torch.float32)
    run = GRAM_RUN[factor.element_size()]
    with torch.cuda.device(factor.device):
        _gram[(records, tiles * (tiles + 1) // 2)](
            *(describe(factor, size, run), out, positions, factor.shape[2], tiles, size, run, alone),
            num_warps=size // 16,
            num_stages=3,
        )
    return out


def compare_grams(left: Tensor, right: Tensor) -> Tensor:
    """Partial sums over the Gram matrices of two factors, in double precision: (3, records, tiles).

    The first sum is over the entrywise product of the two matrices. The other two are over the products
    and sums of the square roots of their diagonals. The matrices are not materialised.
    """
    size, tiles, alone = _tiles(left)
    out = left.new_empty(3, len(left), tiles * (tiles + 1) // 2, dtype=torch.float64)
    run = GRAM_RUN[left.element_size()]
    with torch.cuda.device(left.device):
        _compare[(len(left), out.shape[2])](
            *(describe(left, size, run), describe(right, size, run), out),
            *(left.shape[2], right.shape[2], tiles, size, run, alone),
            num_warps=size // 16,
            num_stages=3,
        )
    return out


def _tiles(factor: Tensor) -> tuple[int, int, bool]:
    """Number of positions per tile, number of tiles along a side, and whether there is only one tile."""
    positions = factor.shape[1]
    size = 128 if positions > 64 and factor.element_size() == 2 else 64
    tiles = triton.cdiv(positions, size)
    return size, tiles, tiles == 1


@triton.jit
def _place(tiles):
    """Row and column of a tile on or above the diagonal."""
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
        # one product per run, because the error of tensor cores grows with the number of additions
        if a.dtype == tl.float32:
            total += tl.dot(a, tl.trans(b), input_precision="tf32x3")
        else:
            total += tl.dot(a, tl.trans(b))
    return total


@triton.jit
def _gram(
    factor, out, positions, entries, tiles,
    size: tl.constexpr, run: tl.constexpr, alone: tl.constexpr,
):  # fmt: skip
    down, across = _place(tiles)
    record = tl.program_id(0)
    values = _gram_tile(factor, record, down * size, across * size, entries, size, run, alone)
    s = down * size + tl.arange(0, size)
    t = across * size + tl.arange(0, size)
    # the squared number of positions may exceed 2**31
    base = out + record.to(tl.int64) * positions * positions
    inside = (s < positions)[:, None] & (t < positions)[None, :]
    tl.store(base + s[:, None].to(tl.int64) * positions + t[None, :], values, mask=inside)
    if across != down:
        tl.store(base + t[None, :].to(tl.int64) * positions + s[:, None], values, mask=inside)


@triton.jit
def _compare(
    left, right, out, rows, columns, tiles,
    size: tl.constexpr, run: tl.constexpr, alone: tl.constexpr,
):  # fmt: skip
    down, across = _place(tiles)
    record = tl.program_id(0)
    left_gram = _gram_tile(left, record, down * size, across * size, rows, size, run, alone)
    right_gram = _gram_tile(right, record, down * size, across * size, columns, size, run, alone)
    square = tl.sum(tl.sum(left_gram.to(tl.float64) * right_gram.to(tl.float64), 1), 0)
    s = down * size + tl.arange(0, size)
    t = across * size + tl.arange(0, size)
    diagonal = s[:, None] == t[None, :]
    # rounding may make a square negative
    left_norms = tl.sum(tl.where(diagonal, left_gram, 0.0), 1)
    right_norms = tl.sum(tl.where(diagonal, right_gram, 0.0), 1)
    left_norms = tl.sqrt(tl.where(left_norms < 0, 0.0, left_norms).to(tl.float64))
    right_norms = tl.sqrt(tl.where(right_norms < 0, 0.0, right_norms).to(tl.float64))
    place = out + record.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    step = tl.num_programs(0).to(tl.int64) * tl.num_programs(1)
    tl.store(place, tl.where(down == across, square, 2 * square))
    tl.store(place + step, tl.sum(left_norms * right_norms, 0))
    tl.store(place + 2 * step, tl.sum(left_norms + right_norms, 0))


SUM_RUN = 128
"""Number of positions per tensor core product in sums."""

_TILE = 128
"""Maximum number of rows and columns per program."""

_PROGRAMS = 264
"""Target number of programs: two per multiprocessor of a large GPU."""


def weighted_block_sums(
    left: Tensor, right: Tensor, weights: Tensor, most: int, *, halves: bool
) -> Tensor:
    """Weighted sums of outer products over blocks of at most `most` records: (blocks, rows, columns).

    Each record's product is computed in single precision and then added to the sum.

    Args:
        left: Left factors in half precision, of shape (records, positions, rows).
        right: Right factors in half precision, of shape (records, positions, columns).
        weights: Weights in single precision, of shape (records,). Records of weight 0 are ignored.
        most: Maximum number of records per block.
        halves: Whether the factors have an additional first dimension with the high and low parts of
            single precision numbers. The product of the low parts is omitted.
    """
    records, positions, rows = left.shape[-3:]
    columns = right.shape[-1]
    high, wide = _power(rows, _TILE), _power(columns, _TILE)
    run = _power(positions, SUM_RUN // 2 if halves else SUM_RUN)
    tiles = triton.cdiv(rows, high) * triton.cdiv(columns, wide)
    per_block = min(most, triton.cdiv(records, triton.cdiv(_PROGRAMS, tiles)))
    blocks = triton.cdiv(records, per_block)
    out = left.new_empty(blocks, rows, columns, dtype=torch.float32)
    with torch.cuda.device(left.device):
        _weighted_sum[(tiles, blocks)](
            *(describe(left.flatten(0, -3), run, high), describe(right.flatten(0, -3), run, wide)),
            *(weights, out, records, positions, rows, columns, per_block, triton.cdiv(positions, run)),
            *(high, wide, run, halves, positions <= run),
            num_warps=8,
            num_stages=_stages(left.device, 2 * (1 + halves) * run * (high + wide)),
        )
    return out


def _power(size: int, most: int) -> int:
    """Smallest power of two >= `size`, between 16 and `most`."""
    return max(16, min(most, 1 << (size - 1).bit_length()))


@lru_cache
def _stages(where: device, size: int) -> int:
    """Number of pipeline stages that fit in shared memory, at most 3; `size` is in bytes per stage."""
    found = triton.runtime.driver.active.utils.get_device_properties(where.index or 0)
    return max(1, min(3, int(found["max_shared_mem"]) // size))


def split_halves(values: Tensor) -> Tensor:
    """Split single precision numbers into high and low bfloat16 parts: (2, *shape)."""
    out = values.new_empty(2, *values.shape, dtype=torch.bfloat16)
    with torch.cuda.device(values.device):
        _split[(triton.cdiv(values.numel(), 2048),)](values, out, values.numel(), 2048)
    return out


@triton.jit
def _weighted_sum(
    left, right, weights, out, records, positions, rows, columns, per_block, runs, high: tl.constexpr,
    wide: tl.constexpr, run: tl.constexpr, halves: tl.constexpr, single: tl.constexpr,
):  # fmt: skip
    # process tiles in groups of eight rows, which share loads
    together: tl.constexpr = 8
    down, across = tl.cdiv(rows, high), tl.cdiv(columns, wide)
    group = tl.program_id(0) // (together * across)
    place = tl.program_id(0) % (together * across)
    tall = tl.minimum(down - group * together, together)
    top, side = (group * together + place % tall) * high, (place // tall) * wide
    first = tl.program_id(1) * per_block
    last = tl.minimum(first + per_block, records)
    total = tl.zeros((high, wide), dtype=tl.float32)
    own = tl.zeros((high, wide), dtype=tl.float32)
    for step in range(first * runs, last * runs):
        record = step // runs
        start = (step - record * runs) * run
        weight = tl.load(weights + record)
        a = left.load([record, start, top]).reshape(run, high)
        b = right.load([record, start, side]).reshape(run, wide)
        if halves:
            c = left.load([records + record, start, top]).reshape(run, high)
            d = right.load([records + record, start, side]).reshape(run, wide)
            # small products first, because the error of tensor cores is relative to the accumulator
            product = tl.dot(tl.trans(a), d)
            product = tl.dot(tl.trans(c), b, product)
            product = tl.dot(tl.trans(a), b, product)
        else:
            product = tl.dot(tl.trans(a), b)
        # the product of a record of weight 0 may not be finite
        if single:
            total += tl.where(weight != 0, product * weight, 0.0)
        else:
            own += product
            if start + run >= positions:
                total += tl.where(weight != 0, own * weight, 0.0)
                own = tl.zeros((high, wide), dtype=tl.float32)
    m, n = top + tl.arange(0, high), side + tl.arange(0, wide)
    block = tl.program_id(1).to(tl.int64)
    where = (block * rows + m[:, None]) * columns + n[None, :]
    tl.store(out + where, total, mask=(m < rows)[:, None] & (n < columns)[None, :])


@triton.jit
def _split(values, out, size, many: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * many + tl.arange(0, many)
    inside = i < size
    value = tl.load(values + i, mask=inside, other=0.0)
    large = value.to(tl.bfloat16)
    tl.store(out + i, large, mask=inside)
    tl.store(out + size + i, (value - large.to(tl.float32)).to(tl.bfloat16), mask=inside)
