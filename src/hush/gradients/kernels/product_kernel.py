"""Weighted sums of outer products on a GPU, in Triton: loaded only where there is one.

They multiply on tensor cores, in half precision, and add in single precision in an order that is written
here, so that its rounding is known (docs/guarantees/tape.md, 5 and 6).
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import triton
from triton import language as tl

if TYPE_CHECKING:
    from torch import Tensor, device

SUM_RUN = 128
"""Positions that a sum multiplies and adds on tensor cores at once."""

_PROGRAMS = 528
"""Programs that keep a large GPU busy: four for each of its processors."""


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
    high, wide, run, warps = _tile(positions, rows * columns, halves)
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
            positions <= run,
            num_warps=warps,
            num_stages=_stages(left.device, 2 * (1 + halves) * run * (high + wide)),
        )
    return out


def _tile(positions: int, entries: int, halves: bool) -> tuple[int, int, int, int]:
    """Rows and columns of a tile, positions a run, and warps: what was fastest on an H200."""
    if halves:
        return 128, 128, SUM_RUN // 2, 8
    if positions > SUM_RUN:
        return 128, 128, SUM_RUN, 8
    if positions > SUM_RUN // 2 and entries < 2**20:
        return 64, 64, SUM_RUN, 4
    return 128, 64, SUM_RUN // 2, 4


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
    single: tl.constexpr,
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
        # a record of weight 0 may not be finite
        if single:
            total += tl.where(weight != 0, product * weight, 0.0)
        else:
            own += product
            if start + run >= positions:
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
