"""Gram matrices and weighted sums of outer products on a GPU, in Triton: loaded only where there is one.

Both multiply on tensor cores, in half precision or TensorFloat-32, and add in single precision in an
order that is written here, so that its rounding is known (docs/guarantees/tape.md, 5 and 6). The names
of a tile's sides follow the products: `rows` and `columns` of the parameter, `positions` of a record.
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import triton
from triton import language as tl

if TYPE_CHECKING:
    from torch import Tensor, device

GRAM_RUN = {2: 64, 4: 32}
"""Entries that a Gram matrix multiplies and adds on tensor cores at once, by bytes an entry."""

SUM_RUN = 128
"""Positions that a sum multiplies and adds on tensor cores at once."""

_TILE = 64
_PROGRAMS = 264
"""Programs that keep a large GPU busy: two for each of its processors."""


def gram(factor: "Tensor") -> "Tensor":
    """The Gram matrix of each record's positions, (records, positions, positions), in single precision.

    Args:
        factor: (records, positions, entries), contiguous, in half precision or single.
    """
    import torch

    records, positions, entries = factor.shape
    tiles = triton.cdiv(positions, _TILE)
    out = factor.new_empty(records, positions, positions, dtype=torch.float32)
    run = GRAM_RUN[factor.element_size()]
    even = positions % _TILE == 0 and entries % run == 0
    with torch.cuda.device(factor.device):
        _gram[(tiles * (tiles + 1) // 2, records)](
            factor, out, positions, entries, tiles, _TILE, run, even, num_warps=4, num_stages=3
        )
    return out


def compare_grams(left: "Tensor", right: "Tensor") -> "Tensor":
    """Of the Gram matrices of two factors: (3, records, tiles) parts of sums in double precision.

    The sum of the product of the two matrices, and of the products and the sums of the roots of their
    diagonals. Nothing is written out.

    Args:
        left: (records, positions, rows), contiguous, in half precision or single.
        right: (records, positions, columns), of the same precision.
    """
    import torch

    records, positions, rows = left.shape
    tiles = triton.cdiv(positions, _TILE)
    out = left.new_empty(3, records, tiles * (tiles + 1) // 2, dtype=torch.float64)
    run = GRAM_RUN[left.element_size()]
    even = positions % _TILE == 0 and rows % run == 0 and right.shape[2] % run == 0
    with torch.cuda.device(left.device):
        _compare[(out.shape[2], records)](
            left,
            right,
            out,
            positions,
            rows,
            right.shape[2],
            tiles,
            _TILE,
            run,
            even,
            num_warps=4,
            num_stages=3,
        )
    return out


def weighted_block_sums(
    left: "Tensor", right: "Tensor", weights: "Tensor", most: int, *, halves: bool
) -> "Tensor":
    """Sums over blocks of at most `most` records of weight times outer product: (blocks, rows, columns).

    Each record's product is formed by itself, in single precision, and then added to the sum.

    Args:
        left: (records, positions, rows), contiguous, in half precision; see `halves`.
        right: (records, positions, columns).
        weights: (records,), in single precision. Products of records of weight 0 are not looked at.
        most: records a block.
        halves: whether `left` and `right` are (2, records, ...), numbers and what half precision left
            of them: the sum of both, without the product of the two small ones, is multiplied.
    """
    import torch

    records, positions, rows = left.shape[-3:]
    columns = right.shape[-1]
    high, wide, warps = (128, 128, 8) if halves or rows * columns < 2**20 else (128, 64, 4)
    run = SUM_RUN // 2 if halves or positions <= SUM_RUN // 2 else SUM_RUN
    tiles = triton.cdiv(rows, high) * triton.cdiv(columns, wide)
    per_block = min(most, triton.cdiv(records, triton.cdiv(_PROGRAMS, tiles)))
    blocks = triton.cdiv(records, per_block)
    out = left.new_empty(blocks, rows, columns, dtype=torch.float32)
    even = positions % run == 0 and rows % high == 0 and columns % wide == 0
    with torch.cuda.device(left.device):
        _weighted_sum[(tiles, blocks)](
            left,
            right,
            weights,
            out,
            records,
            positions,
            rows,
            columns,
            per_block,
            triton.cdiv(positions, run),
            high,
            wide,
            run,
            halves,
            even,
            num_warps=warps,
            num_stages=_stages(left.device, 2 * (1 + halves) * run * (high + wide)),
        )
    return out


@lru_cache
def _stages(where: "device", size: int) -> int:
    """How many loads of so many bytes a GPU's shared memory holds ahead, 3 at most."""
    found = triton.runtime.driver.active.utils.get_device_properties(where.index or 0)
    return max(1, min(3, int(found["max_shared_mem"]) // size))


def split_halves(values: "Tensor") -> "Tensor":
    """Numbers in single precision as two in bfloat16, the second what the first left: (2, *shape)."""
    import torch

    out = values.new_empty(2, *values.shape, dtype=torch.bfloat16)
    with torch.cuda.device(values.device):
        _split[(triton.cdiv(values.numel(), 2048),)](values, out, values.numel(), 2048)
    return out


@triton.jit
def _place(tiles):
    """Row and column of a tile among those on and above the diagonal."""
    across = tl.program_id(0)
    down = 0
    while across >= tiles - down:
        across -= tiles - down
        down += 1
    return down, down + across


@triton.jit
def _gram_tile(
    base,
    s,
    t,
    positions,
    entries,
    size: tl.constexpr,
    run: tl.constexpr,
    even: tl.constexpr,
):
    k = tl.arange(0, run)
    first = base + s[:, None].to(tl.int64) * entries + k[None, :]
    second = base + t[None, :].to(tl.int64) * entries + k[:, None]
    total = tl.zeros((size, size), dtype=tl.float32)
    for start in range(0, entries, run):
        if even:
            a = tl.load(first + start)
            b = tl.load(second + start)
        else:
            inside = start + k < entries
            a = tl.load(first + start, mask=(s < positions)[:, None] & inside[None, :], other=0.0)
            b = tl.load(second + start, mask=(t < positions)[None, :] & inside[:, None], other=0.0)
        # a product of its own for each run: what tensor cores lose grows with what they add
        if a.dtype == tl.float32:
            total += tl.dot(a, b, input_precision="tf32x3")
        else:
            total += tl.dot(a, b)
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
    even: tl.constexpr,
):
    down, across = _place(tiles)
    record = tl.program_id(1).to(tl.int64)
    s = down * size + tl.arange(0, size)
    t = across * size + tl.arange(0, size)
    values = _gram_tile(factor + record * positions * entries, s, t, positions, entries, size, run, even)
    base = out + record * positions * positions
    inside = (s < positions)[:, None] & (t < positions)[None, :]
    tl.store(base + s[:, None] * positions + t[None, :], values, mask=inside)
    if across != down:
        tl.store(base + t[None, :] * positions + s[:, None], values, mask=inside)


@triton.jit
def _compare(
    left,
    right,
    out,
    positions,
    rows,
    columns,
    tiles,
    size: tl.constexpr,
    run: tl.constexpr,
    even: tl.constexpr,
):
    down, across = _place(tiles)
    record = tl.program_id(1).to(tl.int64)
    s = down * size + tl.arange(0, size)
    t = across * size + tl.arange(0, size)
    left_gram = _gram_tile(left + record * positions * rows, s, t, positions, rows, size, run, even)
    right_gram = _gram_tile(
        right + record * positions * columns, s, t, positions, columns, size, run, even
    )
    square = tl.sum(tl.sum((left_gram * right_gram).to(tl.float64), 1), 0)
    diagonal = s[:, None] == t[None, :]
    # clamped: rounding may have left a square below zero
    left_norms = tl.sum(tl.where(diagonal, left_gram, 0.0), 1)
    right_norms = tl.sum(tl.where(diagonal, right_gram, 0.0), 1)
    left_norms = tl.sqrt(tl.where(left_norms < 0, 0.0, left_norms).to(tl.float64))
    right_norms = tl.sqrt(tl.where(right_norms < 0, 0.0, right_norms).to(tl.float64))
    place = out + record * tl.num_programs(0) + tl.program_id(0)
    step = tl.num_programs(1).to(tl.int64) * tl.num_programs(0)
    tl.store(place, tl.where(down == across, square, 2 * square))
    tl.store(place + step, tl.sum(left_norms * right_norms, 0))
    tl.store(place + 2 * step, tl.sum(left_norms + right_norms, 0))


@triton.jit
def _weighted_sum(
    left,
    right,
    weights,
    out,
    records,
    positions,
    rows,
    columns,
    per_block,
    runs,
    high: tl.constexpr,
    wide: tl.constexpr,
    run: tl.constexpr,
    halves: tl.constexpr,
    even: tl.constexpr,
):
    # tiles of eight rows of tiles one after another, which share what they load
    together: tl.constexpr = 8
    down, across = tl.cdiv(rows, high), tl.cdiv(columns, wide)
    group = tl.program_id(0) // (together * across)
    place = tl.program_id(0) % (together * across)
    tall = tl.minimum(down - group * together, together)
    m = (group * together + place % tall) * high + tl.arange(0, high)
    n = (place // tall) * wide + tl.arange(0, wide)
    t = tl.arange(0, run)
    block = tl.program_id(1).to(tl.int64)
    first = tl.program_id(1) * per_block
    last = tl.minimum(first + per_block, records)
    left_tile = left + t[:, None].to(tl.int64) * rows + m[None, :]
    right_tile = right + t[:, None].to(tl.int64) * columns + n[None, :]
    rest = (records + tl.zeros((), tl.int64)) * positions
    total = tl.zeros((high, wide), dtype=tl.float32)
    own = tl.zeros((high, wide), dtype=tl.float32)
    for step in range(first * runs, last * runs):
        record = step // runs
        start = (step - record * runs) * run
        at = record.to(tl.int64) * positions + start
        weight = tl.load(weights + record)
        if even:
            a = tl.load(left_tile + at * rows)
            b = tl.load(right_tile + at * columns)
        else:
            inside = (start + t < positions)[:, None]
            in_rows, in_columns = inside & (m < rows)[None, :], inside & (n < columns)[None, :]
            a = tl.load(left_tile + at * rows, mask=in_rows, other=0.0)
            b = tl.load(right_tile + at * columns, mask=in_columns, other=0.0)
        if halves:
            if even:
                c = tl.load(left_tile + (rest + at) * rows)
                d = tl.load(right_tile + (rest + at) * columns)
            else:
                c = tl.load(left_tile + (rest + at) * rows, mask=in_rows, other=0.0)
                d = tl.load(right_tile + (rest + at) * columns, mask=in_columns, other=0.0)
            # the small ones first: what tensor cores lose is a share of what they have
            product = tl.dot(tl.trans(a), d)
            product = tl.dot(tl.trans(c), b, product)
            product = tl.dot(tl.trans(a), b, product)
        else:
            product = tl.dot(tl.trans(a), b)
        own += product
        if start + run >= positions:
            # a record of weight 0 may not be finite
            total += tl.where(weight != 0, own * weight, 0.0)
            own = tl.zeros((high, wide), dtype=tl.float32)
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
