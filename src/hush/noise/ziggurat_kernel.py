"""Exact noise on a GPU, in Triton: loaded only where there is one.

One kernel proposes and rounds all numbers; another settles the few that need a height, a place in the
tail or more bits, from words of their own. What double precision cannot decide is left to
`ziggurat.settled`, which reads the same words: about one number in 10^10.
"""

from typing import TYPE_CHECKING

import triton
from triton import language as tl

from hush.core.randomness import Randomness, random_bits
from hush.noise.layers import LAYERS, PLACE_BITS, Tables, layers

if TYPE_CHECKING:
    from torch import Tensor

ATTEMPTS = 6
WORDS = 4 * ATTEMPTS + 1
"""For each attempt a height, a strip of the tail, a place in it and the next proposal; then a position
within the place."""
_SIZE = 256
_SHIFT = tl.constexpr(63 - PLACE_BITS)
_MASK = tl.constexpr(LAYERS - 1)


def propose_and_settle(
    location: "Tensor", beta: float, units: float, step: float, table: Tables, source: Randomness
) -> "tuple[Tensor, Tensor, Tensor]":
    """Replace a flat double tensor by its rounded sum with noise, where double precision decides.

    Returns:
        The indices that are left as they were, their first words, and their further words.
    """
    import torch

    law, count = layers(beta), len(location)
    words = random_bits(count, source)
    open_ = torch.empty(count, dtype=torch.int8, device=location.device)
    unsure = law.widest * units + 2.0**-28
    with torch.cuda.device(location.device):
        _propose[(triton.cdiv(count, 1024),)](
            location, words, table.cells, table.limits, open_, count, step, units, unsure, 1024
        )
        where = open_.nonzero().flatten()
        first = words[where]
        further = random_bits(len(where) * WORDS, source).to(location.device).view(-1, WORDS)
        left = torch.zeros(len(where), dtype=torch.int8, device=location.device)
        if len(where):
            _settle[(triton.cdiv(len(where), _SIZE),)](
                *(location, where, first, further, left, len(where)),
                *(table.cells, table.limits, table.heights, table.strips),
                *(step, units, unsure, beta, law.edge, law.strip * 2.0**-law.tail_bits),
                (1 << law.tail_bits) - 1,
                ATTEMPTS,
                _SIZE,
            )
    rare = left.nonzero().flatten()
    return where[rare], first[rare], further[rare]


@triton.jit
def _propose(location, words, cells, limits, open_, count, step, units, unsure, size: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    inside = index < count
    word = tl.load(words + index, mask=inside, other=0)
    layer = word & _MASK
    start = (word >> _SHIFT).to(tl.float64) * tl.load(cells + layer)
    high = tl.abs(start) >= tl.load(limits + layer)
    below, total = _summed(tl.load(location + index, mask=inside, other=0.0), start, step, units)
    rounded = tl.floor(total + 0.5)
    settled = (tl.abs(total - rounded) <= 0.5 - unsure) & (high == 0)
    tl.store(location + index, (below + rounded) * step, mask=inside & settled)
    tl.store(open_ + index, (settled == 0).to(tl.int8), mask=inside)


@triton.jit
def _summed(value, start, step, units):
    """Whole multiples of the grid in a location, and the rest of it plus noise, in units of the grid."""
    scaled = value / step
    below = tl.where(scaled < 0, tl.ceil(scaled), tl.floor(scaled))
    return below, (scaled - below) + start * units


@triton.jit
def _settle(
    location,
    where,
    first,
    further,
    left,
    count,
    cells,
    limits,
    heights,
    strips,
    step,
    units,
    unsure,
    beta,
    edge,
    tail_cell,
    tail_mask,
    attempts: tl.constexpr,
    size: tl.constexpr,
):
    row = tl.program_id(0) * size + tl.arange(0, size)
    inside = row < count
    index = tl.load(where + row, mask=inside, other=0)
    word = tl.load(first + row, mask=inside, other=0)
    own = further + row.to(tl.int64) * (4 * attempts + 1)
    base = tl.load(cells)
    top = tl.load(heights + 1)
    start = (word >> _SHIFT).to(tl.float64) * 0.0
    width = start
    done = inside == 0
    lost = done & inside
    for attempt in tl.static_range(attempts):
        layer = word & _MASK
        cell = tl.load(cells + layer)
        place = (word >> _SHIFT).to(tl.float64) * cell
        high = tl.abs(place) >= tl.load(limits + layer)
        nearest = tl.where(place >= 0, place, -place - base)
        beyond = high & (layer == 0) & (nearest >= edge)
        chance = tl.load(own + 4 * attempt, mask=inside, other=0)
        bits = tl.load(own + 4 * attempt + 1, mask=inside, other=0)
        spot = tl.load(own + 4 * attempt + 2, mask=inside, other=0)
        # number of leading zeros of 52 bits, from the exponent of an exact double
        short = (bits >> 12) & 0xFFFFFFFFFFFFF
        strip = 1074 - (short.to(tl.float64).to(tl.int64, bitcast=True) >> 52)
        strip = tl.where(beyond & (short != 0), strip, 0)
        far = tl.load(strips + strip) + (spot & tail_mask).to(tl.float64) * tail_cell
        within = (beyond == 0) | (far < tl.load(strips + strip + 1))
        low = tl.where(beyond, 0.0, tl.load(heights + layer))
        halved = ((1023 - strip) << 52).to(tl.float64, bitcast=True)
        high_end = tl.where(beyond, top * halved, tl.load(heights + layer + 1))
        share = ((chance >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16  # 2**-53
        height = low + share * (high_end - low)
        size_of = tl.where(beyond, far, tl.abs(place))
        wide = tl.where(beyond, tail_cell, cell)
        curve = tl.exp(-tl.exp(beta * tl.log(size_of)))
        steep = beta * tl.exp((beta - 1.0) * tl.log(size_of + wide)) * wide
        near = tl.abs(height - curve) <= (9.313225746154785e-10 + 2.0 * steep) * curve  # 2**-30
        lost = lost | ((done == 0) & high & ((within & near) | (beyond & (short == 0))))
        kept = (high == 0) | (within & (height < curve))
        sign = tl.where(place < 0, -1.0, 1.0)
        now = (done == 0) & kept
        start = tl.where(now, tl.where(beyond, sign * far, place), start)
        width = tl.where(now, tl.where(beyond, sign * tail_cell, cell), width)
        done = done | kept
        again = tl.load(own + 4 * attempt + 3, mask=inside, other=0)
        word = tl.where(done, word, again)
    lost = lost | (done == 0)
    below, total = _summed(tl.load(location + index, mask=inside, other=0.0), start, step, units)
    rounded = tl.floor(total + 0.5)
    close = tl.abs(total - rounded) > 0.5 - unsure
    more = (tl.load(own + 4 * attempts, mask=inside, other=0) >> 11) & 0x1FFFFFFFFFFFFF
    finer = total + more.to(tl.float64) * 1.1102230246251565e-16 * (width * units)
    total = tl.where(close, finer, total)
    rounded = tl.floor(total + 0.5)
    # further bits are below 2**-50 of a place, and rounding is below 2**-30
    lost = lost | (close & (tl.abs(total - rounded) > 0.5 - 3.725290298461914e-09))  # 2**-28
    tl.store(location + index, (below + rounded) * step, mask=inside & (lost == 0))
    tl.store(left + row, lost.to(tl.int8), mask=inside)
