"""Weighted sums of outer products on a GPU, in Triton: loaded only where there is one.

They multiply on tensor cores, in half precision, and add in single precision in an order that is written
here, so that its rounding is known (docs/guarantees/tape.md, 5 and 6).
"""

from functools import lru_cache
from typing import TYPE_CHECKING

import triton
from triton import language as tl

from hush.gradients.kernels.descriptors import describe

if TYPE_CHECKING:
    from torch import Tensor, device

SUM_RUN = 128
"""Positions that a sum multiplies and adds on tensor cores at once."""

_TILE = 128
"""Rows and columns that a program adds up, at most."""

_PROGRAMS = 264
"""Programs that keep a large GPU busy: two for each of its processors."""


def weighted_block_sums(
    left: "Tensor", right: "Tensor", weights: "Tensor", most: int, *, halves: bool
) -> "Tensor":
    """Sums over blocks of at most `most` records of weight times outer product: (blocks, rows, columns).

    Each record's product is formed by itself, in single precision, and then added to the sum.

    Args:
        left: (records, positions, rows), in half precision; see `halves`.
        right: (records, positions, columns).
        weights: (records,), in single precision. Products of records of weight 0 are not looked at.
        most: records a block.
        halves: whether `left` and `right` are (2, records, ...), numbers and what half precision left
            of them: the sum of both, without the product of the two small ones, is multiplied.
    """
    import torch

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
            describe(left.flatten(0, -3), run, high),
            describe(right.flatten(0, -3), run, wide),
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
            positions <= run,
            num_warps=8,
            num_stages=_stages(left.device, 2 * (1 + halves) * run * (high + wide)),
        )
    return out


def _power(size: int, most: int) -> int:
    """The power of two from 16 up to `most` that holds the size, if one does."""
    return max(16, min(most, 1 << (size - 1).bit_length()))


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
    single: tl.constexpr,
):
    # tiles of eight rows of tiles one after another, which share what they load
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
