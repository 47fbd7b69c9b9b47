"""One exact draw from random words, in rational arithmetic: the reference for every other sampler."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, localcontext
from fractions import Fraction
from functools import partial

from hush.core.randomness import RandomSource, Stream, random_words
from hush.noise.exact.layers import DIGITS, LAYERS, PLACE_SHIFT, layers

ATTEMPTS = 8
"""Blocks reserved per sample. A sample needs more with probability below 2**-60."""
SIZE = 128
"""Number of proposal blocks that are computed together."""
WORDS = 8
"""64-bit words per block: the proposals of eight samples, or all words of one attempt."""


@dataclass(frozen=True)
class Words:
    """Random words for the samples of one call: a word per proposal, and a block per attempt."""

    source: Stream
    proposals: int
    """Nonce of the proposals."""
    attempts: int
    """Nonce of the blocks for attempts."""

    def proposal(self, index: int) -> int:
        """First proposal of a sample. Word k of SIZE blocks belongs to SIZE consecutive samples."""
        group, place = divmod(index, WORDS * SIZE)
        word, block = divmod(place, SIZE)
        return self.source.block(self.proposals, group * SIZE + block)[word]

    def attempt(self, index: int, attempt: int) -> list[int]:
        """Words of the block of an attempt."""
        if attempt < ATTEMPTS:
            return self.source.block(self.attempts, index * ATTEMPTS + attempt)
        words: list[int] = random_words(WORDS, self.source).tolist()
        return words

    def exact_sum(self, location: float, beta: float, scale: float, step: float, index: int) -> float:
        """`exact_sum` for a sample, from its reserved words."""
        word, attempt = self.proposal(index), partial(self.attempt, index)
        return exact_sum(location, beta, scale, step, word, attempt, self.source)


def reserve(count: int, source: Stream) -> Words:
    """Reserve words for the next `count` samples under two nonces."""
    return Words(source, source.reserve(count), source.reserve(count * ATTEMPTS * WORDS))


def exact_sum(
    location: float,
    beta: float,
    scale: float,
    step: float,
    word: int,
    attempt: Callable[[int], list[int]],
    source: RandomSource,
) -> float:
    """Sum of `location` and a noise draw, rounded to a grid of spacing `step`.

    `word` is the first proposal: layer, sign and cell index. `attempt(k)` returns the words of attempt
    k: the height, the strip of the tail, the cell in the strip, the position in the cell, the next
    proposal, and more bits of the height and of the position. `source` provides additional words.
    """
    below = math.trunc(Fraction(location) / Fraction(step))
    rest, units = Fraction(location) / Fraction(step) - below, Fraction(scale) / Fraction(step)
    start, width, position, size = _drawn(beta, word, attempt, source)
    begin = rest + units * start + Fraction(1, 2)
    while True:
        ends = begin + units * width * position, begin + units * width * (position + size)
        if math.floor(ends[0]) == math.floor(ends[1]):
            return float(below + math.floor(ends[0])) * step
        position += size * _share(int(random_words(1, source)[0]), 64)
        size /= 2**64


def _drawn(
    beta: float, word: int, attempt: Callable[[int], list[int]], source: RandomSource
) -> tuple[Fraction, Fraction, Fraction, Fraction]:
    """Standard draw: start and width of its cell, lower end and width of the position's interval."""
    law, number = layers(beta), 0
    while True:
        height, zeros, spot, position, following, finer_height, finer_position, _ = attempt(number)
        layer = word & LAYERS - 1
        low, high = law.heights[layer], law.heights[layer + 1]
        width = Fraction(float(law.cells[layer]))
        start, inside = (word >> PLACE_SHIFT) * width, True
        if layer == 0 and (start if start >= 0 else -start - width) >= Fraction(law.edge):
            sign = -1 if start < 0 else 1
            bits, strip = zeros >> 12 & 2**52 - 1, 52  # leading zeros, possibly across several words
            while not bits:
                bits, strip = int(random_words(1, source)[0]) >> 12 & 2**52 - 1, strip + 52
            strip -= bits.bit_length()
            width = Fraction(law.strip) / 2**law.tail_bits
            far = Fraction(float(law.strips[strip])) + (spot & 2**law.tail_bits - 1) * width
            inside = far < Fraction(float(law.strips[strip + 1]))
            start, width = sign * far, sign * width
            with localcontext(prec=DIGITS):
                low, high = Decimal(0), law.heights[1] / 2**strip
        place = _share(position, 53) + _share(finer_position, 64) / 2**53
        share = _share(height, 53) + _share(finer_height, 64) / 2**53
        if inside:
            with localcontext(prec=DIGITS):
                size_of = abs(start + width * place)
                curve = law.curve(Decimal(size_of.numerator) / size_of.denominator)
                if low + Decimal(share.numerator) / share.denominator * (high - low) < curve:
                    return start, width, place, Fraction(1, 2**117)
        word, number = following, number + 1


def _share(word: int, bits: int) -> Fraction:
    """Number in [0, 1) from the top bits of a signed 64-bit word."""
    return Fraction(word % 2**64 >> 64 - bits, 2**bits)
