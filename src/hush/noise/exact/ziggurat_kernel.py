"""Exact noise on a GPU in two Triton kernels; imported only if there is a GPU.

The first kernel generates a random word per entry, adds the proposed noise and rounds. It lists the 0.5%
of entries that need a random height, a cell in the tail or more bits. The second kernel resolves these
entries, each from its own blocks of the stream. About one sum in 10^10 cannot be rounded in double
precision; `exact_draw.exact_sum` computes it from the same words.
"""

import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import triton
from triton import language as tl

from hush.core.chacha_kernel import SECRET, chacha20, secret
from hush.core.randomness import Stream
from hush.noise.exact.exact_draw import ATTEMPTS, SIZE, WORDS, Words, reserve
from hush.noise.exact.layers import LAYERS, PLACE_BITS, layers

if TYPE_CHECKING:
    from torch import Tensor, device, dtype

GROUP = 16
"""Number of programs that share a list of about 100 entries, which one program resolves."""
_PART = 1 << 25
"""Entries per launch. The lists of two launches are in memory at once, with 4 bytes per entry."""
_LOW = PLACE_BITS - 31
"""Bits of a cell index in the lower half of its word."""
_COMPILED: dict[tuple[Any, "dtype", "device"], Any] = {}
"""Compiled kernels by argument types; Triton's own lookup takes longer than a launch."""


def add_noise(location: "Tensor", beta: float, scale: float, step: float, source: Stream) -> "Tensor":
    """`ziggurat.add_noise` for a contiguous tensor on a grid of spacing `step`."""
    import torch

    def decide(
        part: "Tensor", total: "Tensor", words: Words, counts: "Tensor", listed: "Tensor"
    ) -> None:
        if int(counts[0]):  # synchronises: undecided entries have no noise yet
            for index in sorted(-1 - row for row in rows(counts, listed) if row < 0):
                total[index] = words.exact_sum(float(total[index]), beta, scale, step, index)
        if total is not part:
            part.copy_(total)

    launched = None
    for part in location.view(-1).split(_PART):
        total = part if part.dtype in (torch.float32, torch.float64) else part.double()
        words = reserve(len(total), source)
        with torch.cuda.device(total.device):
            queued = part, total, words, *launch(total, beta, scale, step, words)
        if launched is not None:  # overlaps with the GPU's work on the next part
            decide(*launched)
        launched = queued
    if launched is not None:
        decide(*launched)
    return location


def launch(
    location: "Tensor", beta: float, scale: float, step: float, words: Words
) -> "tuple[Tensor, Tensor]":
    """Add noise to a 1-D tensor in place and round it, except undecided entries.

    Returns:
        Counts and lists for `rows`. The first count is the number of undecided entries.
    """
    import torch

    count, where = len(location), location.device
    programs = -(-count // (WORDS * SIZE))
    groups = -(-programs // GROUP)
    counts = torch.zeros(1 + groups, dtype=torch.int32, device=where)
    listed = torch.empty(groups * GROUP * WORDS * SIZE, dtype=torch.int32, device=where)
    key = words.source.key
    arguments = (
        *(location, counts, listed, *_law(beta, where), count),
        # passed as bits, because Triton passes a Python float in single precision
        *struct.unpack("<2q", struct.pack("<2d", step, scale / step)),
        *(*secret(key, words.proposals), *secret(key, words.attempts)[8:]),
    )
    for kernel, size in ((propose, programs), (resolve_listed, groups)):
        variant = kernel, location.dtype, where
        if variant in _COMPILED:
            _COMPILED[variant][size, 1, 1](*arguments)
        else:
            _COMPILED[variant] = kernel[(size,)](*arguments)
    return counts, listed


def rows(counts: "Tensor", listed: "Tensor") -> list[int]:
    """Indices of the entries that needed more than one word; -1 - index for undecided entries."""
    groups = listed.view(-1, GROUP * WORDS * SIZE).tolist()
    return [row for many, group in zip(counts[1:].tolist(), groups, strict=True) for row in group[:many]]


@lru_cache(maxsize=64)
def _law(beta: float, where: "device") -> "tuple[Tensor, Tensor]":
    """Ziggurat tables on a device.

    Returns:
        Per layer, the bound on the top 31 bits of the cells that are entirely under the curve; and a
        table of constants, cell widths, heights and strips.
    """
    import torch

    law = layers(beta)
    # cells with top bits m end below (m + 1) 2**5 cell widths, so below the limit if m < bound
    bounds = np.maximum(np.ceil(law.limits / (law.cells * 2.0**_LOW)) - 1, 0)
    tail = [law.strip * 2.0**-law.tail_bits, 2.0**law.tail_bits - 1]
    constants = np.array([law.widest, beta, law.edge, *tail, 0, 0, 0])
    table = np.concatenate([constants, law.cells, law.rounded_heights, law.strips])
    return torch.from_numpy(bounds.astype(np.int32)).to(where), torch.from_numpy(table).to(where)


_SHIFT = tl.constexpr(63 - PLACE_BITS)
_MASK = tl.constexpr(LAYERS - 1)
_ATTEMPTS = tl.constexpr(ATTEMPTS)
_SIZE = tl.constexpr(SIZE)
_EACH = tl.constexpr(WORDS * SIZE)
"""Samples per Triton program; each uses one 64-bit word."""
_GROUP = tl.constexpr(GROUP)
_CONSTANTS, _CELLS, _HEIGHTS = tl.constexpr(8), tl.constexpr(LAYERS), tl.constexpr(LAYERS + 1)
_ARGUMENTS = (
    *("location", "counts", "listed", "bounds", "table", "count", "step_bits", "units_bits"),
    *(*SECRET, "m0", "m1", "m2"),
)


@triton.jit(do_not_specialize=_ARGUMENTS, do_not_specialize_on_alignment=_ARGUMENTS)
def propose(
    location, counts, listed, bounds, table, count, step_bits, units_bits,
    k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, m0, m1, m2,
):  # fmt: skip
    step, units = step_bits.to(tl.float64, bitcast=True), units_bits.to(tl.float64, bitcast=True)
    # margin for the widest cell and for rounding errors of sums below 2**22
    sure = 0.5 - (tl.load(table) * units + 3.725290298461914e-09)  # 2**-28
    cells = table + _CONSTANTS
    program = tl.program_id(0)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = chacha20(
        program * _SIZE + tl.arange(0, _SIZE), k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2
    )
    first = program * _EACH + tl.arange(0, _SIZE)
    o0 = _add_proposal(location, first, count, x0, x1, cells, bounds, step, units, sure)
    o1 = _add_proposal(location, first + _SIZE, count, x2, x3, cells, bounds, step, units, sure)
    o2 = _add_proposal(location, first + 2 * _SIZE, count, x4, x5, cells, bounds, step, units, sure)
    o3 = _add_proposal(location, first + 3 * _SIZE, count, x6, x7, cells, bounds, step, units, sure)
    o4 = _add_proposal(location, first + 4 * _SIZE, count, x8, x9, cells, bounds, step, units, sure)
    o5 = _add_proposal(location, first + 5 * _SIZE, count, x10, x11, cells, bounds, step, units, sure)
    o6 = _add_proposal(location, first + 6 * _SIZE, count, x12, x13, cells, bounds, step, units, sure)
    o7 = _add_proposal(location, first + 7 * _SIZE, count, x14, x15, cells, bounds, step, units, sure)
    each = o0 + o1 + o2 + o3 + o4 + o5 + o6 + o7
    group = program // _GROUP
    listed += group * (_GROUP * _EACH)
    # relaxed: no program reads the output of another one
    taken = tl.atomic_add(counts + 1 + group, tl.sum(each, 0), sem="relaxed")
    place = listed + taken + tl.cumsum(each, 0) - each
    place = _append(place, first, o0)
    place = _append(place, first + _SIZE, o1)
    place = _append(place, first + 2 * _SIZE, o2)
    place = _append(place, first + 3 * _SIZE, o3)
    place = _append(place, first + 4 * _SIZE, o4)
    place = _append(place, first + 5 * _SIZE, o5)
    place = _append(place, first + 6 * _SIZE, o6)
    place = _append(place, first + 7 * _SIZE, o7)


@triton.jit(do_not_specialize=_ARGUMENTS, do_not_specialize_on_alignment=_ARGUMENTS)
def resolve_listed(
    location, counts, listed, bounds, table, count, step_bits, units_bits,
    k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2, m0, m1, m2,
):  # fmt: skip
    """Accept or reject the entries of a list by a random height, round, and count undecided entries."""
    step, units = step_bits.to(tl.float64, bitcast=True), units_bits.to(tl.float64, bitcast=True)
    group = tl.program_id(0)
    many = tl.load(counts + 1 + group)
    listed += group * (_GROUP * _EACH)
    beta, edge, tail_cell = tl.load(table + 1), tl.load(table + 2), tl.load(table + 3)
    tail_mask = tl.load(table + 4).to(tl.int64)
    cells = table + _CONSTANTS
    heights = cells + _CELLS
    strips = heights + _HEIGHTS
    base, peak = tl.load(cells), tl.load(heights + 1)
    # upper bound on the rounding error of curve and height (docs/guarantees/sampling.md, section 7)
    unsure = beta * 1.8189894035458565e-12  # 2**-39
    begin = 0
    while begin < many:
        row = begin + tl.arange(0, _SIZE)
        inside = row < many
        index = tl.load(listed + row, mask=inside, other=0)
        low, high = _proposal(index, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2)
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
            # a cell with a negative index extends towards zero
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
            its_start = tl.where(beyond, sign * far, place)
            its_width = tl.where(beyond, sign * tail_cell, cell)
            its_position = _share(p0, p1)
            size = tl.abs(its_start + its_width * its_position)
            curve = tl.exp(-tl.exp(beta * tl.log(size)))
            near = within & (tl.abs(height - curve) <= unsure * curve)
            lost = lost | (open_ & (near | (beyond & (short == 0))))
            kept = open_ & within & (height < curve)
            start = tl.where(kept, its_start, start)
            width = tl.where(kept, its_width, width)
            position = tl.where(kept, its_position, position)
            open_ = open_ & (kept == 0) & (lost == 0)
            low, high = w0, w1
            attempt += 1
        below, rest = _split(tl.load(location + index, mask=inside, other=0.0), step)
        total = rest + (start * units + (width * units) * position)
        rounded = tl.floor(total + 0.5)
        # the remaining bits are below 2**-53 of a cell, and four rounding errors below 2**-51
        close = tl.abs(total - rounded) > 0.5 - (tl.abs(total) + 2.0) * 8.881784197001252e-16  # 2**-50
        lost = lost | open_ | (inside & close)
        value = ((below + rounded) * step).to(location.dtype.element_ty)
        tl.store(location + index, value, mask=inside & (lost == 0))
        tl.store(listed + row, -1 - index, mask=lost)
        left = tl.sum(lost.to(tl.int32), 0)
        if left > 0:
            tl.atomic_add(counts, left)
        begin += _SIZE


@triton.jit
def _add_proposal(location, index, count, low, high, cells, bounds, step, units, sure):
    """Add noise if the cell determines the rounded sum. Returns 1 if it does not."""
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
def _append(place, index, open_):
    tl.store(place, index, mask=open_ != 0)
    return place + open_


@triton.jit
def _place(low, high):
    """Signed cell index within a layer, from the top 37 bits of a random word."""
    return (_long(low, high) >> _SHIFT).to(tl.float64)


@triton.jit
def _split(value, step):
    """Integer part and remainder of a value, in units of the grid spacing."""
    scaled = value.to(tl.float64) * (1.0 / step)
    below = tl.where(scaled < 0, tl.ceil(scaled), tl.floor(scaled))
    return below, scaled - below


@triton.jit
def _proposal(index, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2):
    """First proposals of the entries with the given indices."""
    program, rest = index // (_EACH), index % (_EACH)
    part = rest // _SIZE
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = chacha20(
        program * _SIZE + rest % _SIZE, k0, k1, k2, k3, k4, k5, k6, k7, n0, n1, n2
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
    """Number in [0, 1) from the top 53 bits of a word."""
    return (_long(low, high) >> 11 & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
