"""Triton kernel of `inverse_cdf`: loaded only where there is a GPU."""

from typing import TYPE_CHECKING, Any

import triton
from triton import language as tl

from hush.noise.exact.inverse_cdf import OCTAVES, PIECES

if TYPE_CHECKING:
    from torch import Tensor

_PAIRS = 512
_COLUMNS = 2 * OCTAVES * PIECES


def add_noise(
    location: "Tensor", scale: float, single: "Tensor", double: "Tensor", seed: "Tensor"
) -> "Tensor":
    """Add `scale` times a draw to every entry of a contiguous tensor, in place."""
    import torch

    count = location.numel()
    grid = (triton.cdiv(count, 2 * _PAIRS),)
    launched: Any = _kernel[grid]
    if location.device.type == "cuda":
        with torch.cuda.device(location.device):
            launched(location, single, double, seed, count, scale, _COLUMNS, _PAIRS)
    else:  # Triton's interpreter
        launched(location, single, double, seed, count, scale, _COLUMNS, _PAIRS)
    return location


@triton.jit
def _kernel(location, single, double, seed, count, scale, columns: tl.constexpr, pairs: tl.constexpr):
    # A Philox call gives four words for each pair of numbers: two for one, two for the other.
    key = tl.load(seed)
    start = tl.load(seed + 1).to(tl.uint64, bitcast=True)
    low, high = start.to(tl.uint32), (start >> 32).to(tl.uint32)
    program = tl.program_id(0)
    pair = (program * pairs + tl.arange(0, pairs)).to(tl.uint32)
    a, b, c, d = tl.philox(key, pair, pair * 0, pair * 0 + low, pair * 0 + high)
    first = _accepted(a, b, 0, single, double, key, pair, low, high, columns)
    second = _accepted(c, d, 1, single, double, key, pair, low, high, columns)
    index = program.to(tl.int64) * (2 * pairs) + tl.arange(0, pairs)
    _add(location, index, count, scale, first)
    _add(location, index + pairs, count, scale, second)


@triton.jit
def _add(location, index, count, scale, noise):
    inside = index < count
    before = tl.load(location + index, mask=inside, other=0.0)
    tl.store(location + index, before + scale * noise, mask=inside)


@triton.jit
def _accepted(one, two, half, single, double, key, pair, low, high, columns: tl.constexpr):
    """Draws of the law by rejection, from two random words each and as many more as it takes."""
    value, open_ = _proposed(one, two, single, columns)
    attempt = 0
    # About one number in 200,000 is open: its bits are few, or it is up to the correction.
    while tl.max(open_.to(tl.int32), 0) > 0:
        e, f, g, _h = tl.philox(
            key, pair, pair * 0 + (4 * attempt + 1 + half), pair * 0 + low, pair * 0 + high
        )
        finer, kept = _corrected(one, two, e, f, g, double, columns)
        value = tl.where(open_ & kept, finer, value)
        open_ = open_ & (kept == 0)
        e, f, g, _h = tl.philox(
            key, pair, pair * 0 + (4 * attempt + 3 + half), pair * 0 + low, pair * 0 + high
        )
        one, two = tl.where(open_, e, one), tl.where(open_, f, two)
        again, still = _proposed(one, two, single, columns)
        value = tl.where(open_, again, value)
        open_ = open_ & still
        attempt += 1
    return tl.where((one & 1) != 0, -value, value)


@triton.jit
def _proposed(one, two, single, columns: tl.constexpr):
    """Absolute values in single precision, and whether they are open."""
    # One word: sign, middle or tail, and 30 bits of the chance. The other: 12 bits more, and 20 of luck.
    coarse = (one >> 2).to(tl.int32)
    fine = (two >> 20).to(tl.int32)
    open_ = ((two & 0xFFFFF) == 0) | (coarse < 4096)
    chance = coarse.to(tl.float32) * 4.656612873077393e-10  # 2**-31
    chance += (fine.to(tl.float32) + 0.5) * 1.1368683772161603e-13  # 2**-43
    chance = tl.minimum(chance, 0.49999997)
    # The exponent and the three highest bits of the rest are the piece; what is left is the place in it.
    bits = chance.to(tl.int32, bitcast=True)
    column = 1007 - (bits >> 20) + ((one >> 1) & 1).to(tl.int32) * (columns // 2)
    place = (((bits & 0xFFFFF) << 3) | 0x3F800000).to(tl.float32, bitcast=True) - 1.0
    value = tl.load(single + 5 * columns + column)
    value = value * place + tl.load(single + 4 * columns + column)
    value = value * place + tl.load(single + 3 * columns + column)
    value = value * place + tl.load(single + 2 * columns + column)
    value = value * place + tl.load(single + columns + column)
    value = value * place + tl.load(single + column)
    return value, open_


@triton.jit
def _corrected(one, two, e, f, g, double, columns: tl.constexpr):
    """The same in double precision with 64 bits more, and whether they are kept."""
    beta, height = tl.load(double), tl.load(double + 1)
    table = double + 2
    finer = e.to(tl.float64) * 2.3283064365386963e-10  # 2**-32
    finer += (f.to(tl.float64) + 0.5) * 5.421010862427522e-20  # 2**-64
    chance = ((one >> 2).to(tl.float64) + finer) * 4.656612873077393e-10  # 2**-31
    chance = tl.where(chance < 0.5, chance, chance - 5.551115123125783e-17)  # 2**-54
    bits = chance.to(tl.int64, bitcast=True)
    column = 8175 - (bits >> 49) + ((one >> 1) & 1).to(tl.int64) * (columns // 2)
    place = (((bits & 0x1FFFFFFFFFFFF) << 3) | 0x3FF0000000000000).to(tl.float64, bitcast=True) - 1.0
    length = ((bits >> 52) << 52).to(tl.float64, bitcast=True) * 0.125
    value = tl.load(table + 5 * columns + column)
    slope = value
    value = value * place + tl.load(table + 4 * columns + column)
    slope = slope * place + value
    value = value * place + tl.load(table + 3 * columns + column)
    slope = slope * place + value
    value = value * place + tl.load(table + 2 * columns + column)
    slope = slope * place + value
    value = value * place + tl.load(table + columns + column)
    slope = slope * place + value
    value = value * place + tl.load(table + column)
    density = tl.exp(-tl.exp(beta * tl.log(value))) * height
    ratio = density * tl.abs(slope) / length
    # Twenty bits of luck keep all but 2**-20 of the proposals; of these, so many that the law comes out.
    chance_kept = (ratio - 1.0) * 1048576.0 + 1.0 - ratio * 0.5
    lucky = g.to(tl.float64) * 2.3283064365386963e-10 < chance_kept
    return value.to(tl.float32), ((two & 0xFFFFF) != 0) | lucky
