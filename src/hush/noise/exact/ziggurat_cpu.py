"""Exact noise on a CPU, in numpy: all numbers in few passes over blocks that stay in its cache.

Most draws are decided by their first word. The half per cent that need a height, or a place in the
tail, are settled together, and so are those whose sum is so near the middle between two points of the
grid that it takes more bits to round. What double precision cannot decide is left to
`exact_draw.exact_sum`, which reads the same words. Large numpy calls leave the interpreter to others, so
that gradients are computed meanwhile.
"""

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hush.core.randomness import Randomness, random_words
from hush.noise.exact.exact_draw import WORDS
from hush.noise.exact.layers import LAYERS, PLACE_SHIFT, Doubles, Integers, layers

BLOCK = 1 << 15
"""Numbers worked on at once: as many as stay in the cache of a core."""
_SURE = 2.0**-30
"""Relative distance of a height from the curve in which double precision is not asked (its error is
2**-40 at most, see the proof)."""
_ROUNDING = 2.0**-28
"""More than the rounding of sums below 2**22."""


@dataclass(frozen=True)
class Undecided:
    """A number that double precision cannot decide, and the words that exact arithmetic makes it of."""

    index: int
    location: float
    word: int
    compared: list[int]
    """Words of a comparison, whose outcome may be open; none where the proposal needs none."""
    position: int
    source: Randomness

    def proposal(self, index: int) -> int:
        """The proposal that is accepted, or open: those before it were rejected for sure."""
        return self.word

    def attempt(self, index: int, attempt: int) -> list[int]:
        """Words of an attempt: those looked at already, then new ones."""
        drawn = random_words(WORDS, self.source).tolist()
        if attempt == 0:
            drawn[3] = self.position
        if attempt == 0 and self.compared:
            drawn[0], drawn[1], drawn[2], drawn[4] = self.compared
        return [int(word) for word in drawn]


@dataclass(eq=False)
class PendingDraws:
    """Standard draws whose lowest bits are still to be drawn, in units of the grid they are rounded to.

    `add_to` turns them into noise around a location and may be called once.
    """

    beta: float
    units: float
    """Scale of the noise over the spacing of the grid."""
    words: Integers
    """Proposals: layer, sign and place."""
    start: Doubles
    """Where the place of each draw begins, in units of the grid."""
    tails: dict[int, float] = field(default_factory=dict)
    """Signed widths of places in the tail, by the draw's index."""
    compared: list[tuple[Integers, Integers]] = field(default_factory=list)
    """Indices of draws that needed a height, and four words of each: a height, a strip of the tail, a
    place in it, and the next proposal. An index may come again: its last words count."""
    undecided: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    """Indices of draws whose height double precision cannot compare with the curve."""

    def add_to(
        self, location: npt.NDArray[np.floating], step: float, source: Randomness
    ) -> list[Undecided]:
        """Replace a flat location by its rounded sum with the draws, where double precision decides.

        Args:
            location: in single or double precision.
            step: spacing of the grid, a power of two.
            source: of the further bits of draws whose sum is next to the middle of two points.

        Returns:
            The numbers that are left to exact arithmetic.
        """
        # distance from a middle between two points of the grid within which a sum may round to both
        unsure = layers(self.beta).widest * self.units + _ROUNDING
        lost = location[self.undecided].astype(np.float64)
        size = min(BLOCK, len(location))
        sums, wholes, floors = (np.empty(size) for _ in range(3))
        small = np.empty(size, np.bool_)
        near, at = [np.empty(0, np.int64)], [np.empty(0)]
        # a location may be infinite or not a number, and its sum too large for single precision
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, len(location), BLOCK):
                part = location[first : first + BLOCK]
                total, below, rounded, close = (
                    buffer[: len(part)] for buffer in (sums, wholes, floors, small)
                )
                # whole multiples of the grid are kept apart, so that nothing of the location is rounded
                np.multiply(part, 1 / step, out=total, dtype=np.float64)
                np.rint(total, out=below)
                np.subtract(total, below, out=total)
                np.add(total, self.start[first : first + BLOCK], out=total)
                # rounding is a floor, and next to a middle are those with a small fraction
                np.add(total, 0.5 + unsure, out=total)
                np.floor(total, out=rounded)
                # no floor is -0.0, so no sum is: the sign of a zero would tell that of the location
                np.add(below, rounded, out=below)
                np.subtract(total, rounded, out=total)
                np.less(total, 2 * unsure, out=close)
                rows = np.flatnonzero(close)
                near.append(rows + first)
                at.append(part[rows].astype(np.float64))
                np.multiply(below, step, out=part, casting="same_kind")
            undecided = self._refine(location, np.concatenate(near), np.concatenate(at), step, source)
        places = zip(self.undecided.tolist(), lost.tolist(), strict=True)
        undecided.update({index: (value, int(random_words(1, source)[0])) for index, value in places})
        return [
            Undecided(index, value, int(self.words[index]), self._compared_with(index), position, source)
            for index, (value, position) in undecided.items()
        ]

    def _refine(
        self,
        location: npt.NDArray[np.floating],
        near: Integers,
        at: Doubles,
        step: float,
        source: Randomness,
    ) -> dict[int, tuple[float, int]]:
        """Round sums with 53 further bits of their draws; return location and bits of the undecided."""
        words = random_words(len(near), source)
        cells = layers(self.beta).cells[self.words[near] & LAYERS - 1].tolist()
        widths = np.array(
            [self.tails.get(i, cell) for i, cell in zip(near.tolist(), cells, strict=True)], np.float64
        )
        below = np.rint(at / step)
        total = at / step - below + self.start[near] + _share(words) * (widths * self.units)
        rounded = np.floor(total + 0.5)
        location[near] = (below + rounded) * step
        # further bits are below 2**-50 of a place
        rare = np.flatnonzero(np.abs(total - rounded) > 0.5 - _ROUNDING)
        return {int(near[k]): (float(at[k]), int(words[k])) for k in rare}

    def _compared_with(self, index: int) -> list[int]:
        """The four words that a height was compared by; none where none was."""
        for rows, words in reversed(self.compared):
            for k in np.flatnonzero(rows == index):
                return [int(word) for word in words[k]]
        return []


def pending_draws(beta: float, count: int, units: float, source: Randomness) -> PendingDraws:
    """Independent draws of density proportional to exp(-|x|^beta), beta >= 1, times `units`."""
    law = layers(beta)
    pending = PendingDraws(beta, units, random_words(count, source), np.empty(count))
    scaled = law.cells * units
    size = min(BLOCK, count)
    layer, place, limit = (np.empty(size, np.int64) for _ in range(3))
    reached = np.empty(size, np.bool_)
    open_ = [np.empty(0, np.int64)]
    for first in range(0, count, BLOCK):
        words, start = pending.words[first : first + BLOCK], pending.start[first : first + BLOCK]
        a, b, c, high = (part[: len(words)] for part in (layer, place, limit, reached))
        np.bitwise_and(words, LAYERS - 1, out=a)
        np.right_shift(words, PLACE_SHIFT, out=b)
        np.take(scaled, a, out=start, mode="clip")  # no index is clipped: the other modes are slower
        np.multiply(b, start, out=start)
        np.take(law.place_limits, a, out=c, mode="clip")
        np.abs(b, out=b)
        np.greater_equal(b, c, out=high)
        open_.append(np.flatnonzero(high) + first)
    undecided = [np.empty(0, np.int64)]
    rows = np.concatenate(open_)
    while len(rows):
        rows, unsure = _accept_or_reject(pending, rows, source)
        undecided.append(unsure)
    pending.undecided = np.concatenate(undecided)
    return pending


def _accept_or_reject(
    pending: PendingDraws, rows: Integers, source: Randomness
) -> tuple[Integers, Integers]:
    """Accept or reject draws by a random height, and propose anew for those rejected.

    Returns:
        Indices of the new proposals that need a height, and of draws left to exact arithmetic.
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
    # the place of a negative start reaches towards zero: its far end is the start itself
    tail = np.flatnonzero((layer == 0) & (np.where(place >= 0, place, -place - width) >= law.edge))
    cell = law.strip * 2.0**-law.tail_bits
    if len(tail):
        bits = further[tail, 1] >> 12 & 2**52 - 1
        strip = 52 - np.frexp(bits.astype(np.float64))[1]
        far = strips[strip] + (further[tail, 2] & 2**law.tail_bits - 1) * cell
        short[tail] = bits == 0  # the first one is further on
        outside[tail] = far >= strips[strip + 1]
        size[tail], width[tail] = far, cell
        low[tail], high[tail] = 0.0, np.ldexp(heights[1], -strip)
    height = low + _share(further[:, 0]) * (high - low)
    with np.errstate(over="ignore", under="ignore"):
        curve = np.exp(-(size**beta))
        # how much the curve changes within a place, relatively
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
    """Uniform numbers below 1, multiples of 2**-53."""
    return (words >> 11 & 2**53 - 1).astype(np.float64) * 2.0**-53
