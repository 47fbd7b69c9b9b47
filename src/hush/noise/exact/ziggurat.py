"""Exact noise of density proportional to exp(-|x|^beta), rounded to a public grid.

The bits of a draw are generated lazily, until they determine the rounding of input + noise (ziggurat,
Marsaglia and Tsang 2000; lazy bits, Karney 2016). The result is the exact rounding of input + noise, so
its low bits leak no information: see docs/guarantees/sampling.md.

This sampler runs on the CPU in numpy, on blocks that fit the cache; `ziggurat_kernel` runs on the GPU.
The first random word determines most draws. About 0.5% of draws need a random height or a cell in the
tail and are resolved in a second pass. A few sums cannot be rounded in double precision;
`exact_draw.exact_sum` computes them from the same words.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hush.core.randomness import RandomSource, Stream, random_words
from hush.noise.exact.exact_draw import WORDS, exact_sum
from hush.noise.exact.layers import LAYERS, PLACE_SHIFT, Doubles, Integers, layers

if TYPE_CHECKING:
    import torch

RELATIVE_SPACING = 2.0**-14
"""Grid spacing in units of the noise scale, before it is rounded down to a power of two."""
BLOCK = 1 << 15
"""Number of entries per block, chosen to fit the cache of a core."""
_PART = 1 << 18
"""Number of entries per allocation. Larger arrays are slower, because the system clears new memory."""
_OUTWARD = 1 + 2.0**-50
"""Rounds scales up: more noise does not increase the privacy cost."""
_SURE = 2.0**-30
"""A height within this relative distance of the curve is undecided (the error is at most 2**-40)."""
_ROUNDING = 2.0**-28
"""Upper bound on the rounding error of sums below 2**22."""


def grid_spacing(scale: float) -> float:
    """Grid spacing for noise of the given scale: the largest power of two of at most scale / 2**14."""
    return 2.0 ** math.floor(math.log2(scale * RELATIVE_SPACING))


def add_noise(
    location: "torch.Tensor", beta: float, scale: float, source: RandomSource
) -> "torch.Tensor":
    """Add noise of density ~ exp(-(|x| / scale)^beta) in place, rounded to `grid_spacing(scale)`.

    Results in types other than single and double precision are rounded a second time.
    """
    scale *= _OUTWARD
    flat = location.is_cuda and location.is_contiguous()
    if flat and isinstance(source, Stream) and source.made_on_gpu(location.numel()):
        from hush.noise.exact import ziggurat_kernel

        return ziggurat_kernel.add_noise(location, beta, scale, grid_spacing(scale), source)
    for part in location.view(-1).split(_PART):
        _add(part, pending_draws(beta, part.numel(), scale / grid_spacing(scale), source), scale, source)
    return location


def _add(location: "torch.Tensor", drawn: "PendingDraws", scale: float, source: RandomSource) -> None:
    """Add CPU noise to a 1-D tensor in place, and round the sum to the grid."""
    import torch

    in_place = location.device.type == "cpu" and location.dtype in (torch.float32, torch.float64)
    total = location.detach() if in_place else location.to("cpu", torch.float64)
    values, step = total.numpy(), grid_spacing(scale)
    for index, (value, position) in drawn.add_to(values, step, source).items():
        values[index] = drawn.exact(index, value, position, scale, step, source)
    if not in_place:
        location.copy_(total)


@dataclass(eq=False)
class PendingDraws:
    """Standard draws without their lowest bits, in units of the grid.

    `add_to` adds them to an array and may be called once.
    """

    beta: float
    units: float
    """Noise scale / grid spacing."""
    words: Integers
    """Random word of each proposal: layer, sign and cell index."""
    start: Doubles
    """Start of each draw's cell, in units of the grid."""
    tails: dict[int, float] = field(default_factory=dict)
    """Signed cell width of each draw in the tail, by index of the draw."""
    compared: list[tuple[Integers, Integers]] = field(default_factory=list)
    """Indices of draws that needed a random height, and four words for each: height, strip of the tail,
    cell in the strip, next proposal. If an index occurs several times, its last entry is valid."""
    undecided: Integers = field(default_factory=partial(np.arange, 0))
    """Indices of draws with a height too close to the curve for double precision."""

    def add_to(
        self, location: npt.NDArray[np.floating], step: float, source: RandomSource
    ) -> dict[int, tuple[float, int]]:
        """Add the draws to a 1-D array in place, and round the sums to the grid.

        Args:
            location: Values in single or double precision.
            step: Grid spacing, a power of two.
            source: Source of further bits, for sums near a midpoint of the grid.

        Returns:
            Entries that need exact arithmetic: index to original value and word of the position in the
            cell.
        """
        # within this distance of a midpoint of the grid, the rounding is undecided
        unsure = layers(self.beta).widest * self.units + _ROUNDING
        lost = location[self.undecided].astype(np.float64)
        size = min(BLOCK, len(location))
        sums, wholes, floors = np.empty((3, size))
        near: list[Integers] = []
        at: list[Doubles] = []
        # an input may be infinite or NaN, and a sum may overflow in single precision
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, len(location), BLOCK):
                part = location[first : first + BLOCK]
                count = len(part)
                total, below, rounded = sums[:count], wholes[:count], floors[:count]
                # split off whole multiples of the grid, so the input is not rounded
                np.multiply(part, 1 / step, out=total, dtype=np.float64)
                np.rint(total, out=below)
                np.subtract(total, below, out=total)
                np.add(total, self.start[first : first + BLOCK], out=total)
                # round with a floor; sums near a midpoint then have a small fractional part
                np.add(total, 0.5 + unsure, out=total)
                np.floor(total, out=rounded)
                # a floor is never -0.0: the sign of a zero would reveal the sign of the input
                np.add(below, rounded, out=below)
                np.subtract(total, rounded, out=total)
                rows = np.flatnonzero(total < 2 * unsure)
                if len(rows):
                    near.append(rows + first)
                    at.append(part[rows].astype(np.float64))
                np.multiply(below, step, out=part, casting="same_kind")
            undecided = self._refine(location, near, at, step, source)
        for index, value in zip(self.undecided.tolist(), lost.tolist(), strict=True):
            undecided[index] = value, int(random_words(1, source)[0])
        return undecided

    def _refine(
        self,
        location: npt.NDArray[np.floating],
        rows: list[Integers],
        at: list[Doubles],
        step: float,
        source: RandomSource,
    ) -> dict[int, tuple[float, int]]:
        """Round sums with 53 more bits of the draws; return the input and bits of undecided sums."""
        words = random_words(sum(map(len, rows)), source)  # advance the stream even for zero words
        if not rows:
            return {}
        near, before = np.concatenate(rows), np.concatenate(at)
        cells = layers(self.beta).cells[self.words[near] & LAYERS - 1].tolist()
        widths = np.array(
            [self.tails.get(i, cell) for i, cell in zip(near.tolist(), cells, strict=True)], np.float64
        )
        below = np.rint(before / step)
        total = before / step - below + self.start[near] + _share(words) * (widths * self.units)
        rounded = np.floor(total + 0.5)
        location[near] = (below + rounded) * step
        # the remaining bits are below 2**-50 of a cell
        rare = np.flatnonzero(np.abs(total - rounded) > 0.5 - _ROUNDING)
        return {int(near[k]): (float(before[k]), int(words[k])) for k in rare}

    def exact(
        self, index: int, location: float, position: int, scale: float, step: float, source: RandomSource
    ) -> float:
        """Rounded sum in exact arithmetic, from the same random words and additional ones."""

        def attempt(number: int) -> list[int]:
            drawn: list[int] = random_words(WORDS, source).tolist()
            if number == 0:
                drawn[3] = position
                for rows, words in self.compared:  # the last comparison may be undecided
                    for k in np.flatnonzero(rows == index):
                        drawn[0], drawn[1], drawn[2], drawn[4] = words[k].tolist()
            return drawn

        return exact_sum(location, self.beta, scale, step, int(self.words[index]), attempt, source)


def pending_draws(beta: float, count: int, units: float, source: RandomSource) -> PendingDraws:
    """Independent draws of density proportional to exp(-|x|^beta), beta >= 1, times `units`."""
    law = layers(beta)
    pending = PendingDraws(beta, units, random_words(count, source), np.empty(count))
    scaled = law.cells * units
    size = min(BLOCK, count)
    layer, place, limit = np.empty((3, size), np.int64)
    open_ = []
    for first in range(0, count, BLOCK):
        words, start = pending.words[first : first + BLOCK], pending.start[first : first + BLOCK]
        a, b, c = layer[: len(words)], place[: len(words)], limit[: len(words)]
        np.bitwise_and(words, LAYERS - 1, out=a)
        np.right_shift(words, PLACE_SHIFT, out=b)
        np.take(scaled, a, out=start, mode="clip")  # all indices are valid; "clip" is the fastest mode
        np.multiply(b, start, out=start)
        np.take(law.place_limits, a, out=c, mode="clip")
        np.abs(b, out=b)
        rows = np.flatnonzero(b >= c)
        if len(rows):
            open_.append(rows + first)
    if open_:
        rows, undecided = np.concatenate(open_), []
        while len(rows):
            rows, unsure = _accept_or_reject(pending, rows, source)
            undecided.append(unsure)
        pending.undecided = np.concatenate(undecided)
    return pending


def _accept_or_reject(
    pending: PendingDraws, rows: Integers, source: RandomSource
) -> tuple[Integers, Integers]:
    """Accept or reject draws by a random height, and draw new proposals for rejected ones.

    Returns:
        Indices of new proposals that need a height, and indices of draws that need exact arithmetic.
    """
    law, beta = layers(pending.beta), pending.beta
    cells, heights, strips = law.cells, law.rounded_heights, law.strips
    words, further = pending.words[rows], random_words(4 * len(rows), source).reshape(-1, 4)
    pending.compared.append((rows, further))
    layer = words & LAYERS - 1
    width = cells[layer]
    place = (words >> PLACE_SHIFT) * width
    size = np.abs(place)
    low, high = heights[layer], heights[layer + 1]
    outside = np.zeros(len(rows), np.bool_)
    short = np.zeros(len(rows), np.bool_)
    # a cell with a negative start extends towards zero, so its start is its outer end
    tail = np.flatnonzero((layer == 0) & (np.where(place >= 0, place, -place - width) >= law.edge))
    cell = law.strip * 2.0**-law.tail_bits
    if len(tail):
        bits = further[tail, 1] >> 12 & 2**52 - 1
        strip = 52 - np.frexp(bits.astype(np.float64))[1]
        far = strips[strip] + (further[tail, 2] & 2**law.tail_bits - 1) * cell
        short[tail] = bits == 0  # all 52 bits are 0: the strip depends on later words
        outside[tail] = far >= strips[strip + 1]
        size[tail], width[tail] = far, cell
        low[tail], high[tail] = 0.0, np.ldexp(heights[1], -strip)
    height = low + _share(further[:, 0]) * (high - low)
    with np.errstate(over="ignore", under="ignore"):
        curve = np.exp(-(size**beta))
        # relative change of the curve within a cell
        steep = beta * (size + width) ** (beta - 1) * width
    near = np.abs(height - curve) <= (_SURE + 2 * steep) * curve
    unsure = short | (near & ~outside)
    accepted = ~outside & (height < curve)
    far_out = tail[accepted[tail] & ~unsure[tail]]
    sign = np.where(place[far_out] < 0, -1.0, 1.0)
    pending.start[rows[far_out]] = sign * size[far_out] * pending.units
    pending.tails.update(zip(rows[far_out].tolist(), (sign * cell).tolist(), strict=True))
    rejected = np.flatnonzero(~accepted & ~unsure)
    renewed, proposed = rows[rejected], further[rejected, 3]
    pending.words[renewed] = proposed
    layer = proposed & LAYERS - 1
    place_of = proposed >> PLACE_SHIFT
    pending.start[renewed] = place_of * (cells[layer] * pending.units)
    open_ = np.abs(place_of) >= law.place_limits[layer]
    return renewed[open_], rows[unsure]


def _share(words: Integers) -> Doubles:
    """Uniform numbers in [0, 1): multiples of 2**-53."""
    return (words >> 11 & 2**53 - 1).astype(np.float64) * 2.0**-53
