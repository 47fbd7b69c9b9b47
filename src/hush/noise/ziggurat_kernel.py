"""Exact noise on a GPU, in Triton: loaded only where there is one.

One kernel makes random words, proposes and rounds all numbers, and lists the half per cent that need a
height, a place in the tail or more bits; another settles these, from blocks of the stream that are each
number's own. What double precision cannot decide (about one number in 10^10) is left to
`exact_draw.settled`, which reads the same words.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import triton
from triton import language as tl

from hush.core.chacha_kernel import SECRET, chacha20, secret
from hush.core.randomness import Stream
from hush.noise.exact_draw import ATTEMPTS, SIZE, WORDS, Words, reserve, settled
from hush.noise.layers import LAYERS, PLACE_BITS, Tables, layers, tables

if TYPE_CHECKING:
    from torch import Tensor, device

_PART = 1 << 25
"""Numbers of one launch: of each, 4 bytes are kept beside it."""
_MOST_PROGRAMS = 1056
"""Programs that settle: eight for each multiprocessor of a large GPU."""
_LOW = PLACE_BITS - 31
"""Bits of a place that are in the lower half of its word."""
_SHIFT = tl.constexpr(63 - PLACE_BITS)
_MASK = tl.constexpr(LAYERS - 1)
_ATTEMPTS = tl.constexpr(ATTEMPTS)
_PARTS = tl.constexpr(WORDS)


def around(location: "Tensor", beta: float, scale: float, step: float, source: Stream) -> "Tensor":
    """Replace a contiguous tensor by its rounded sum with noise, each number exactly.

    Args:
        location: another type than single or double precision is rounded once more to that type.
        beta: exponent of the law.
        scale: of the noise.
        step: spacing of the grid.
        source: of the words.
    """
    import torch

    for part in location.view(-1).split(_PART):
        total = part if part.dtype in (torch.float32, torch.float64) else part.double()
        words = reserve(len(total), source)
        with torch.cuda.device(total.device):
            counts, listed = launch(total, beta, scale, step, words)
        many, left = counts.tolist()  # the one wait: what is undecided has no noise yet
        if left:
            for index in (-1 - listed[:many][listed[:many] < 0]).sort().values.tolist():
                total[index] = settled(float(total[index]), beta, scale, step, words, index)
        if total is not part:
            part.copy_(total)
    return location


def launch(
    location: "Tensor", beta: float, scale: float, step: float, words: Words
) -> "tuple[Tensor, Tensor]":
    """Replace a flat tensor by its rounded sum with noise, where double precision decides.

    Returns:
        How many numbers were listed and how many of these are left as they were; and the list, with
        -1 - index for a number that is left.
    """
    import torch

    count, where = len(location), location.device
    table, law = _law(beta, where)
    counts = torch.zeros(2, dtype=torch.int32, device=where)
    listed = torch.empty(count, dtype=torch.int32, device=where)
    key, proposals = words.source.key, secret(words.source.key, words.proposals)
    settling = min(triton.cdiv(count, WORDS * SIZE), _MOST_PROGRAMS)
    numbers = (location, counts, listed, table.cells)
    # in double precision: Triton passes a Python float in single
    grid = _bits(step), _bits(scale / step)
    _propose[(triton.cdiv(count, WORDS * SIZE),)](
        *numbers, law.bounds, law.constants, count, *grid, *proposals, SIZE
    )
    _settle[(settling,)](
        *numbers,
        table.heights,
        table.strips,
        law.constants,
        law.tail_mask,
        *grid,
        *proposals,
        *secret(key, words.attempts)[8:],
        SIZE,
    )
    return counts, listed


@dataclass(frozen=True)
class _Law:
    bounds: "Tensor"
    """Places whose highest 31 bits are below this are under the curve as a whole."""
    constants: "Tensor"
    """Width of the widest place, beta, the tail's edge and the width of its places."""
    tail_mask: int


@lru_cache(maxsize=64)
def _law(beta: float, where: "device") -> tuple[Tables, _Law]:
    """Tables of a law on a device."""
    import torch

    law, table = layers(beta), tables(beta, where)
    # a place whose highest bits are m ends below (m + 1) 2**5 cells: below the limit if m < bound
    bounds = np.maximum(np.ceil(table.limits.cpu().numpy() / (law.cells * 2.0**_LOW)) - 1, 0)
    constants = [law.widest, beta, law.edge, law.strip * 2.0**-law.tail_bits]
    return table, _Law(
        torch.from_numpy(bounds.astype(np.int32)).to(where),
        torch.tensor(constants, dtype=torch.float64, device=where),
        (1 << law.tail_bits) - 1,
    )


def _bits(value: float) -> int:
    """The bits of a double, as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


@triton.jit(do_not_specialize=["count", "step_bits", "units_bits", *SECRET])
def _propose(
    location,
    counts,
    listed,
    cells,
    bounds,
    constants,
    count,
    step_bits,
    units_bits,
    k0,
    k1,
    k2,
    k3,
    k4,
    k5,
    k6,
    k7,
    n0,
    n1,
    n2,
    size: tl.constexpr,
):
    step, units = step_bits.to(tl.float64, bitcast=True), units_bits.to(tl.float64, bitcast=True)
    # more than the rounding of numbers below 2**22
    sure = 0.5 - (tl.load(constants) * units + 3.725290298461914e-09)  # 2**-28
    block = tl.program_id(0) * size + tl.arange(0, size)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = chacha20(
        block, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2
    )
    first = tl.program_id(0) * (_PARTS * size) + tl.arange(0, size)
    o0 = _add(location, first, count, x0, x1, cells, bounds, step, units, sure)
    o1 = _add(location, first + size, count, x2, x3, cells, bounds, step, units, sure)
    o2 = _add(location, first + 2 * size, count, x4, x5, cells, bounds, step, units, sure)
    o3 = _add(location, first + 3 * size, count, x6, x7, cells, bounds, step, units, sure)
    o4 = _add(location, first + 4 * size, count, x8, x9, cells, bounds, step, units, sure)
    o5 = _add(location, first + 5 * size, count, x10, x11, cells, bounds, step, units, sure)
    o6 = _add(location, first + 6 * size, count, x12, x13, cells, bounds, step, units, sure)
    o7 = _add(location, first + 7 * size, count, x14, x15, cells, bounds, step, units, sure)
    each = o0 + o1 + o2 + o3 + o4 + o5 + o6 + o7
    total = tl.sum(each, 0)
    if total > 0:
        place = listed + tl.atomic_add(counts, total) + tl.cumsum(each, 0) - each
        place = _note(place, first, o0)
        place = _note(place, first + size, o1)
        place = _note(place, first + 2 * size, o2)
        place = _note(place, first + 3 * size, o3)
        place = _note(place, first + 4 * size, o4)
        place = _note(place, first + 5 * size, o5)
        place = _note(place, first + 6 * size, o6)
        place = _note(place, first + 7 * size, o7)


@triton.jit
def _add(location, index, count, low, high, cells, bounds, step, units, sure):
    """Add noise where a place decides; return 1 where it does not."""
    inside = index < count
    layer = (low & _MASK).to(tl.int32)
    top = high.to(tl.int32, bitcast=True)
    under = (top ^ (top >> 31)) < tl.load(bounds + layer)
    start = _place(low, high) * tl.load(cells + layer)
    below, rest = _split(tl.load(location + index, mask=inside, other=0.0), step)
    total = rest + start * units
    rounded = tl.floor(total + 0.5)
    settled = under & (tl.abs(total - rounded) <= sure)
    value = ((below + rounded) * step).to(location.dtype.element_ty)
    tl.store(location + index, value, mask=inside & settled)
    return (inside & (settled == 0)).to(tl.int32)


@triton.jit
def _note(place, index, open_):
    tl.store(place, index, mask=open_ != 0)
    return place + open_


@triton.jit
def _place(low, high):
    """Signed number of a place in its layer: the highest 37 bits of a word."""
    return (_long(low, high) >> _SHIFT).to(tl.float64)


@triton.jit
def _split(value, step):
    """Whole multiples of the grid in a location, and the rest of it in units of the grid."""
    scaled = value.to(tl.float64) * (1.0 / step)
    below = tl.where(scaled < 0, tl.ceil(scaled), tl.floor(scaled))
    return below, scaled - below


@triton.jit(do_not_specialize=["tail_mask", "step_bits", "units_bits", *SECRET, "m0", "m1", "m2"])
def _settle(
    location,
    counts,
    listed,
    cells,
    heights,
    strips,
    constants,
    tail_mask,
    step_bits,
    units_bits,
    k0,
    k1,
    k2,
    k3,
    k4,
    k5,
    k6,
    k7,
    n0,
    n1,
    n2,
    m0,
    m1,
    m2,
    size: tl.constexpr,
):
    step, units = step_bits.to(tl.float64, bitcast=True), units_bits.to(tl.float64, bitcast=True)
    beta, edge, tail_cell = tl.load(constants + 1), tl.load(constants + 2), tl.load(constants + 3)
    base, peak = tl.load(cells), tl.load(heights + 1)
    # twice what single roundings in the curve and of the height come to (docs/guarantees/sampling.md)
    unsure = beta * 1.8189894035458565e-12  # 2**-39
    many = tl.load(counts)
    begin = tl.program_id(0) * size
    while begin < many:
        row = begin + tl.arange(0, size)
        inside = row < many
        index = tl.load(listed + row, mask=inside, other=0)
        low, high = _proposal(index, size, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2)
        start = index.to(tl.float64) * 0.0
        width = start
        position = start
        open_ = inside
        lost = inside & (row < 0)
        attempt = 0
        while (attempt < _ATTEMPTS) & (tl.max(open_.to(tl.int32), 0) > 0):
            h0, h1, s0, s1, f0, f1, p0, p1, w0, w1, _x10, _x11, _x12, _x13, _x14, _x15 = chacha20(
                index * _ATTEMPTS + attempt, k0, k1, k2, k3, k4, k5, k6, k7, m0, m1, m2
            )
            layer = (low & _MASK).to(tl.int32)
            cell = tl.load(cells + layer)
            place = _place(low, high) * cell
            # a negative place reaches towards zero
            beyond = (layer == 0) & (tl.where(place >= 0, place, -place - base) >= edge)
            # number of leading zeros of 52 bits, from the exponent of an exact double
            short = _long(s0, s1) >> 12 & 0xFFFFFFFFFFFFF
            strip = 1074 - (short.to(tl.float64).to(tl.int64, bitcast=True) >> 52)
            strip = tl.where(beyond & (short != 0), strip, 0)
            far = tl.load(strips + strip) + (_long(f0, f1) & tail_mask).to(tl.float64) * tail_cell
            within = (beyond == 0) | (far < tl.load(strips + strip + 1))
            floor = tl.where(beyond, 0.0, tl.load(heights + layer))
            halved = ((1023 - strip) << 52).to(tl.float64, bitcast=True)
            ceiling = tl.where(beyond, peak * halved, tl.load(heights + layer + 1))
            height = floor + _share(h0, h1) * (ceiling - floor)
            sign = tl.where(place < 0, -1.0, 1.0)
            now_start = tl.where(beyond, sign * far, place)
            now_width = tl.where(beyond, sign * tail_cell, cell)
            now_position = _share(p0, p1)
            size_of = tl.abs(now_start + now_width * now_position)
            curve = tl.exp(-tl.exp(beta * tl.log(size_of)))
            near = within & (tl.abs(height - curve) <= unsure * curve)
            lost = lost | (open_ & (near | (beyond & (short == 0))))
            kept = open_ & within & (height < curve)
            start = tl.where(kept, now_start, start)
            width = tl.where(kept, now_width, width)
            position = tl.where(kept, now_position, position)
            open_ = open_ & (kept == 0) & (lost == 0)
            low, high = w0, w1
            attempt += 1
        below, rest = _split(tl.load(location + index, mask=inside, other=0.0), step)
        total = rest + (start * units + (width * units) * position)
        rounded = tl.floor(total + 0.5)
        # further bits are below 2**-50 of a place, and roundings four at most
        close = tl.abs(total - rounded) > 0.5 - (tl.abs(total) + 2.0) * 8.881784197001252e-16  # 2**-50
        lost = lost | open_ | (inside & close)
        value = ((below + rounded) * step).to(location.dtype.element_ty)
        tl.store(location + index, value, mask=inside & (lost == 0))
        tl.store(listed + row, -1 - index, mask=lost)
        left = tl.sum(lost.to(tl.int32), 0)
        if left > 0:
            tl.atomic_add(counts + 1, left)
        begin += tl.num_programs(0) * size


@triton.jit
def _proposal(index, size: tl.constexpr, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2):
    """The words that `_propose` made for these numbers."""
    program, rest = index // (_PARTS * size), index % (_PARTS * size)
    part = rest // size
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = chacha20(
        program * size + rest % size, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2
    )
    low, high = _chosen(part == 1, x2, x3, x0, x1)
    low, high = _chosen(part == 2, x4, x5, low, high)
    low, high = _chosen(part == 3, x6, x7, low, high)
    low, high = _chosen(part == 4, x8, x9, low, high)
    low, high = _chosen(part == 5, x10, x11, low, high)
    low, high = _chosen(part == 6, x12, x13, low, high)
    return _chosen(part == 7, x14, x15, low, high)


@triton.jit
def _chosen(condition, low, high, other_low, other_high):
    return tl.where(condition, low, other_low), tl.where(condition, high, other_high)


@triton.jit
def _long(low, high):
    return (high.to(tl.int64) << 32) | low.to(tl.int64)


@triton.jit
def _share(low, high):
    """A number in [0, 1) of the highest 53 bits of a word."""
    return (_long(low, high) >> 11 & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
