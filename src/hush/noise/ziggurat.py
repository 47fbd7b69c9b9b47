"""Exact noise of density proportional to exp(-|x|^beta), rounded to a public grid.

A draw is a real number of which only as many bits are drawn as it takes to round its sum with the
location (rejection from layers, Marsaglia and Tsang 2000; lazy bits, Karney 2016). What comes out is
the rounding of location + noise exactly: no statistical distance is left to be charged but that of the
random bits, and nothing can be read from the lowest bits of a floating-point sum.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from fractions import Fraction
from typing import TYPE_CHECKING

from hush.core.randomness import Randomness, Stream, random_bits, random_words
from hush.noise import fused
from hush.noise.layers import DIGITS, LAYERS, PLACE_BITS, layers, tables

if TYPE_CHECKING:
    import torch

GRID = 2.0**-14
"""Spacing of the grid over the scale, before it is rounded down to a power of two."""
CHUNK = {"cpu": 1 << 15, "cuda": 1 << 24}
"""Numbers worked on at once: on the CPU as many as stay in its cache."""
_PART = {"cpu": 1 << 20, "cuda": 1 << 24}
"""Numbers of which the draws are kept at once."""
_SHIFT = 63 - PLACE_BITS
_OUTWARD = 1 + 2.0**-50
"""More noise costs no more: scales are rounded up."""
_SURE = 2.0**-30
"""Relative distance of a height from the curve in which double precision is not asked (its error is
2**-40 at most, see the proof)."""


@dataclass(eq=False)
class Draws:
    """Standard draws of which some bits are still to be drawn: each lies in a place from `start` on.

    `around` turns them into noise around a location and may be called once.
    """

    beta: float
    start: "torch.Tensor"
    """Where the place of each draw begins; exact in double precision."""
    layer: "torch.Tensor"
    tails: dict[int, float] = field(default_factory=dict)
    """Signed widths of places in the tail, by the draw's index."""
    known: dict[int, Fraction] = field(default_factory=dict)
    """What is known of the position in the place where 64 of its bits were needed to accept it."""

    def around(self, location: "torch.Tensor", scale: float, source: Randomness) -> None:
        """Replace a flat double tensor by its rounded sum with `scale` times the draws."""
        for first in range(0, len(location), CHUNK[location.device.type]):
            part = slice(first, first + CHUNK[location.device.type])
            self._round(location[part], first, scale, source)

    def _round(self, location: "torch.Tensor", first: int, scale: float, source: Randomness) -> None:
        import torch

        step = grid(scale)
        units = scale / step  # exact: a power of two
        start = self.start[first : first + len(location)]
        # the widest place, and more than the rounding of numbers below 2**22
        unsure = layers(self.beta).widest * units + 2.0**-28
        # the whole multiples of the grid are kept apart, so that nothing of the location is rounded
        below = location.mul_(1 / step).trunc()
        rest = location.sub_(below)
        total = torch.add(rest, start, alpha=units)
        rounded = (total + 0.5).floor_()
        off = total.sub_(rounded).abs_()
        near = (off > 0.5 - unsure).nonzero().flatten()
        if len(near):
            places = [first + index for index in near.tolist()]
            known = zip(places, rest[near].tolist(), start[near].tolist(), strict=True)
            exact = [self._exactly(*each, units, source) for each in known]
            rounded[near] = torch.tensor(exact, dtype=torch.float64, device=rounded.device)
        torch.add(below, rounded, out=location).mul_(step)

    def _exactly(self, index: int, rest: float, start: float, units: float, source: Randomness) -> int:
        """Nearest integer to rest + units * draw, with further bits of the draw until it is sure."""
        width = Fraction(self.tails[index]) if index in self.tails else self._cell(index)
        width *= Fraction(units)
        begin = Fraction(rest) + Fraction(units) * Fraction(start) + Fraction(1, 2)
        place, size = self.known.get(index, Fraction(0)), Fraction(1)
        if index in self.known:
            size = Fraction(1, 2**64)
        while True:
            ends = begin + width * place, begin + width * (place + size)
            if math.floor(ends[0]) == math.floor(ends[1]):
                return math.floor(ends[0])
            place += size * _fraction(source)
            size /= 2**64

    def _cell(self, index: int) -> Fraction:
        return Fraction(float(layers(self.beta).cells[int(self.layer[index])]))


def around(location: "torch.Tensor", beta: float, scale: float, source: Randomness) -> "torch.Tensor":
    """`location` plus noise of density ~ exp(-(|x| / scale)^beta), on multiples of `grid(scale)`.

    In place where the location is in double precision; another type is rounded once more to that type.
    """
    import torch

    scale *= _OUTWARD
    if fused.fits(location, beta, source):
        return fused.around(location, beta, scale, source)
    if isinstance(source, Stream) and _by_kernel(location, source):
        from hush.noise import ziggurat_kernel

        return ziggurat_kernel.around(location, beta, scale, grid(scale), source)
    flat = location.view(-1)
    for part in flat.split(_PART[flat.device.type]):
        total = part if part.dtype == torch.float64 else part.double()
        draws(beta, len(part), source, part.device).around(total, scale, source)
        if total is not part:
            part.copy_(total)
    return location


def _by_kernel(location: "torch.Tensor", source: Stream) -> bool:
    """Whether a kernel on the GPU draws the noise: the words it reads are made there, too."""
    return location.is_cuda and source.made_on_gpu(location.numel()) and location.is_contiguous()


def settled(
    beta: float, location: float, scale: float, word: int, further: list[int], source: Randomness
) -> float:
    """The rounded sum of a location and the draw that these words give, in exact arithmetic.

    Args:
        beta: exponent of the law.
        location: what noise is added to.
        scale: of the noise.
        word: the proposal: layer, sign and place.
        further: for each attempt a height, a strip of the tail, a place in it and the next proposal;
            last the first bits of the position within the place.
        source: of the bits that are needed beyond these.
    """
    law, step = layers(beta), grid(scale)
    below = math.trunc(location / step)
    rest, units = Fraction(location) / Fraction(step) - below, Fraction(scale) / Fraction(step)
    position, size = Fraction(further[-1] >> 11 & 2**53 - 1, 2**53), Fraction(1, 2**53)
    attempt = 0
    while True:
        drawn = further[4 * attempt : 4 * attempt + 4] if 4 * attempt + 4 < len(further) else []
        drawn = drawn or random_words(4, source).tolist()
        layer, width = word & LAYERS - 1, Fraction(float(law.cells[word & LAYERS - 1]))
        start, sign = (word >> _SHIFT) * width, 1
        reach = start if start >= 0 else -start - width
        low, high = law.heights[layer], law.heights[layer + 1]
        open_, inside = abs(start) >= Fraction(law.inner[layer]) - width, True
        if layer == 0 and open_ and reach >= Fraction(law.edge):
            sign = -1 if start < 0 else 1
            strip = _leading_zeros(drawn[1] >> 12 & 2**52 - 1, source)
            width = Fraction(law.strip) / 2**law.tail_bits
            far = Fraction(float(law.strips[strip])) + (drawn[2] & 2**law.tail_bits - 1) * width
            start, width = sign * far, sign * width
            inside = far < Fraction(float(law.strips[strip + 1]))
            with localcontext(prec=DIGITS):
                low, high = Decimal(0), law.heights[1] / 2**strip
        if not open_:
            break
        if inside:
            share = Fraction(drawn[0] >> 11 & 2**53 - 1, 2**53) + _fraction(source) / 2**53
            position, size = position + size * _fraction(source), size / 2**64
            with localcontext(prec=DIGITS):
                height = low + _decimal(share) * (high - low)
                if height < law.curve(_decimal(abs(start + width * position))):
                    break
        # what was looked at to reject a place says nothing of the next one
        position, size = Fraction(0), Fraction(1)
        word, attempt = drawn[3], attempt + 1
    begin = rest + units * start + Fraction(1, 2)
    while True:
        ends = begin + units * width * position, begin + units * width * (position + size)
        if math.floor(ends[0]) == math.floor(ends[1]):
            return float(below + math.floor(ends[0])) * step
        position, size = position + size * _fraction(source), size / 2**64


def _leading_zeros(bits: int, source: Randomness) -> int:
    """Zeros before the first one of 52 bits, and of further ones if there is none."""
    return (
        52 - bits.bit_length()
        if bits
        else 52 + _leading_zeros(int(random_words(1, source)[0]) >> 12 & 2**52 - 1, source)
    )


def prepare(
    beta: float, count: int, scale: float, source: Randomness, device: "torch.device"
) -> "Callable[[torch.Tensor], torch.Tensor]":
    """What `around` does for one flat location of `count` doubles, with the draws made now."""
    unused = [draws(beta, count, source, device)]

    def rounded(location: "torch.Tensor") -> "torch.Tensor":
        unused.pop().around(location, scale * _OUTWARD, source)  # two sums under one noise tell both
        return location

    return rounded


def grid(scale: float) -> float:
    """Spacing of the grid that noise of this scale is rounded to: a power of two below scale / 2**14."""
    return 2.0 ** math.floor(math.log2(scale * GRID))


def draws(beta: float, count: int, source: Randomness, device: "torch.device") -> Draws:
    """Independent draws of density proportional to exp(-|x|^beta), beta >= 1."""
    import torch

    found = Draws(
        beta,
        torch.empty(count, dtype=torch.float64, device=device),
        torch.empty(count, dtype=torch.int16, device=device),
    )
    chunk = CHUNK[device.type]
    parts = zip(found.start.split(chunk), found.layer.split(chunk), strict=True)
    open_ = [
        _propose(beta, start, layer, source).add_(k * chunk) for k, (start, layer) in enumerate(parts)
    ]
    undecided = torch.cat(open_) if open_ else torch.arange(0)
    if device.type != "cpu" and len(undecided):
        # few numbers and many small operations, for which a GPU is slower to ask than a CPU is to do
        few = Draws(beta, found.start[undecided].cpu(), found.layer[undecided].cpu())
        _settle_all(few, torch.arange(len(undecided)), source)
        found.start[undecided], found.layer[undecided] = few.start.to(device), few.layer.to(device)
        places = undecided.tolist()
        found.tails.update({places[k]: width for k, width in few.tails.items()})
        found.known.update({places[k]: share for k, share in few.known.items()})
        return found
    _settle_all(found, undecided, source)
    return found


def _settle_all(found: Draws, undecided: "torch.Tensor", source: Randomness) -> None:
    while len(undecided):
        undecided = _settle(found, undecided, source)


def _propose(
    beta: float, start: "torch.Tensor", layer: "torch.Tensor", source: Randomness
) -> "torch.Tensor":
    """Fill both with random places in random layers; return the indices of those that need a height."""
    import torch

    table = tables(beta, start.device)
    words = random_bits(len(start), source).to(start.device)
    drawn = words & LAYERS - 1
    layer.copy_(drawn)
    torch.mul(words.bitwise_right_shift_(_SHIFT), table.cells.index_select(0, drawn), out=start)
    return (start.abs() >= table.limits.index_select(0, drawn)).nonzero().flatten()


def _settle(found: Draws, where: "torch.Tensor", source: Randomness) -> "torch.Tensor":
    """Accept or reject draws by a random height; return which of those proposed anew are open."""
    import torch

    law, table = layers(found.beta), tables(found.beta, found.start.device)
    start, layer = found.start[where], found.layer[where].long()
    # the place of a negative start reaches towards zero: its far end is the start itself
    beyond = (layer == 0) & (start.where(start >= 0, -start - law.cells[0]) >= law.edge)
    low, high, width = table.heights[layer], table.heights[layer + 1], table.cells[layer]
    inside = torch.ones_like(beyond)
    if bool(beyond.any()):
        strip, place = _tail(int(beyond.sum()), law.tail_bits, source, start.device)
        cell = law.strip * 2.0**-law.tail_bits
        far = table.strips[strip] + place * cell
        sign = torch.where(start[beyond] < 0, -1.0, 1.0).to(torch.float64)
        inside[beyond] = far < table.strips[strip + 1]
        start[beyond], width[beyond] = sign * far, sign * cell
        low[beyond], high[beyond] = 0.0, table.heights[1] * torch.exp2(-strip.double())
        found.start[where] = start
    share = (random_bits(len(where), source).to(start.device) >> 11 & 2**53 - 1).double() * 2.0**-53
    height = low + share * (high - low)
    size = start.abs()
    curve = size.pow(found.beta).neg().exp()
    # how much the curve changes within a place, relatively
    steep = found.beta * (size + width.abs()).pow(found.beta - 1) * width.abs()
    unsure = inside & ((height - curve).abs() <= (_SURE + 2 * steep) * curve)
    kept = inside & (height < curve)
    for row in unsure.nonzero().flatten().tolist():
        strip_of = int(strip[int(beyond[:row].sum())]) if bool(beyond[row]) else None
        kept[row] = _accepted(found, int(where[row]), float(width[row]), share[row], strip_of, source)
    far_out = kept & beyond
    found.tails.update(zip(where[far_out].tolist(), width[far_out].tolist(), strict=True))
    rejected = where[~kept]
    start, again = found.start[rejected], found.layer[rejected]
    open_ = _propose(found.beta, start, again, source)
    found.start[rejected], found.layer[rejected] = start, again
    return rejected[open_]


def _tail(
    count: int, bits: int, source: Randomness, device: "torch.device"
) -> "tuple[torch.Tensor, torch.Tensor]":
    """Strips, number j with chance 2**-(j+1), and places in them."""
    import torch

    words = random_bits(3 * count, source).cpu().view(3, count)
    # the number of zero bits before the first one, over 126 bits
    strip = torch.zeros(count, dtype=torch.int64)
    for row, (one, two) in enumerate(words[:2].T.tolist()):
        joined = (one & 2**63 - 1) << 63 | two & 2**63 - 1
        strip[row] = 126 - joined.bit_length()
    return strip.to(device), (words[2] & 2**bits - 1).to(device)


def _accepted(
    found: Draws,
    index: int,
    width: float,
    share: "torch.Tensor",
    strip: int | None,
    source: Randomness,
) -> bool:
    """Whether a random height is below the curve, with 64 further bits of the place and the height."""
    law, layer = layers(found.beta), int(found.layer[index])
    position = _fraction(source)
    finer = Fraction(float(share)) + _fraction(source) / 2**53
    with localcontext(prec=DIGITS):
        low, high = law.heights[layer], law.heights[layer + 1]
        if strip is not None:
            low, high = Decimal(0), law.heights[1] / 2**strip
        height = low + _decimal(finer) * (high - low)
        place = Fraction(float(found.start[index])) + Fraction(width) * position
        below = height < law.curve(_decimal(abs(place)))
    if below:
        found.known[index] = position
    return below


def _fraction(source: Randomness) -> Fraction:
    """A random number below 1 with 64 bits."""
    return Fraction(int(random_words(1, source)[0]) % 2**64, 2**64)


def _decimal(value: Fraction) -> Decimal:
    return Decimal(value.numerator) / Decimal(value.denominator)
