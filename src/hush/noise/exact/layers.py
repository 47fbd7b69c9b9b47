"""Ziggurat layers: rectangles of equal area that cover exp(-x^beta), for rejection sampling.

Layer k has half-width W_k and spans the heights from h_k to h_{k+1} = h_k + A / W_k, so all layers have
the same area even if W_k is rounded. Widths are rounded up, so the layers cover the curve. The table
affects the speed of sampling but not the distribution: see docs/guarantees/sampling.md.
"""

import math
from dataclasses import dataclass
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

LAYER_BITS = 10
LAYERS = 1 << LAYER_BITS
PLACE_BITS = 36
"""Bits of the cell index in a layer, without the sign. Widths have 17 bits, so cell bounds are exact in
double precision."""
PLACE_SHIFT = 63 - PLACE_BITS
"""First bit of the signed cell index in a word. The lowest bits are the index of the layer."""
DIGITS = 50
_WIDTH_BITS = 53 - PLACE_BITS
_STRIPS = 128
"""Number of strips of the tail. The part beyond them has less than 2**-128 of the tail's probability."""
_MARGIN = 2.0**-40
"""Relative outward shift of edges, which is far larger than their rounding error."""


@dataclass(frozen=True)
class Layers:
    """Cover of exp(-x^beta): layers, and strips of the tail beyond the edge of the first layer."""

    beta: float
    cells: Doubles
    """Cell width of each layer: W_k / 2**36."""
    inner: Doubles
    """Per layer: the rectangle up to this position is entirely under the curve."""
    heights: list[Decimal]
    """h_0 = 0, h_1, ..., h_LAYERS >= 1, to 50 digits."""
    edge: float
    """Start of the tail. Cells of layer 0 beyond it are redrawn from the tail."""
    strip: float
    """Width of every strip of the tail."""
    strips: Doubles
    """Start of strip j: the curve there is at most h_1 / 2**j."""
    tail_bits: int
    """Bits of the cell index in a strip: the largest number for which cell bounds are exact in double
    precision."""

    widest: float
    """Width of the widest cell."""
    limits: Doubles
    """Per layer: cells that start below this position are entirely under the curve."""
    place_limits: Integers
    """Per layer: index of the first cell that needs a random height."""
    rounded_heights: Doubles
    """Heights in double precision."""

    def curve(self, x: Decimal) -> Decimal:
        """exp(-x^beta), accurate to nearly 50 digits."""
        if not x:
            return Decimal(1)
        return (-((x.ln() * Decimal(self.beta)).exp())).exp()


@lru_cache(maxsize=64)
def layers(beta: float) -> Layers:
    """Smallest layers that cover exp(-x^beta) up to its peak, for beta >= 1."""
    low, high = 0.05, 40.0  # bracket for x^beta at the edge of the tail
    while high - low > 1e-9:
        middle = (low + high) / 2
        low, high = (middle, high) if _stack(beta, middle)[2][-1] >= 1 else (low, middle)
    return layers_beyond(beta, low)


def layers_beyond(beta: float, power: float) -> Layers:
    """Layers with a tail from a height of about exp(-power); valid if they reach the peak."""
    wide, inner, _, edge, strip = _stack(beta, power)
    with localcontext(prec=DIGITS):
        first = Decimal(_edge_height(edge, beta))
        area = first * Decimal(wide[0])
        heights = [Decimal(0), first]
        for width in wide[1:]:
            heights.append(heights[-1] + area / Decimal(width))
    reach = -math.log(float(first))
    begins = [edge]
    unit = strip * 2.0**-8
    for j in range(1, _STRIPS + 1):
        reached = (reach + j * math.log(2)) ** (1 / beta) * (1 + _MARGIN)
        begins.append(max(edge, math.ceil(reached / unit) * unit))
    tail_bits = PLACE_BITS - math.ceil(math.log2(begins[-1] / strip))
    cells = np.array(wide) * 2.0**-PLACE_BITS
    limits = np.maximum(np.array(inner) - cells, 0.0)
    return Layers(
        *(beta, cells, np.array(inner), heights, edge, strip, np.array(begins), tail_bits),
        widest=max(float(cells[0]), strip * 2.0**-tail_bits),
        limits=limits,
        place_limits=np.floor(limits / cells).astype(np.int64),
        rounded_heights=np.array([float(height) for height in heights]),
    )


def _stack(beta: float, power: float) -> tuple[list[float], list[float], list[float], float, float]:
    """Widths, inner edges and heights of layers with a tail from a height of about exp(-power).

    The part of layer 0 beyond the edge has the total area of the strips, twice that of the first strip.
    """
    first_strip = (power + math.log(2)) ** (1 / beta) - power ** (1 / beta)
    share = 1
    inner_edge = power ** (1 / beta)
    # smallest tail, as a fraction 2**-share of layer 0, with strips of sufficient width
    while inner_edge / (1 - 2.0 ** -(share + 1)) * 2.0 ** -(share + 2) >= first_strip * (1 + 2.0**-12):
        share += 1
    base = _up(inner_edge / (1 - 2.0**-share))
    edge, strip = base * (1 - 2.0**-share), base * 2.0 ** -(share + 1)
    height = _edge_height(edge, beta)
    area = height * base
    wide, inner, heights = [base], [_place(beta, height) * (1 - _MARGIN)], [0.0, height]
    while len(wide) < LAYERS:
        width = _up(max(_place(beta, heights[-1]), 2.0**-30) * (1 + _MARGIN))
        wide.append(width)
        heights.append(heights[-1] + area / width)
        inner.append(_place(beta, heights[-1]) * (1 - _MARGIN))
    return wide, inner, heights, edge, strip


def _place(beta: float, height: float) -> float:
    """Position at which the curve has the given height; 0 for heights above the peak."""
    return float(max(-math.log(height), 0.0) ** (1 / beta))


def _edge_height(edge: float, beta: float) -> float:
    """Height of the first layer: the value of the curve at the edge of the tail, rounded up."""
    return math.nextafter(math.exp(-float(edge**beta * (1 - _MARGIN))), math.inf)


def _up(value: float) -> float:
    """Round up to the number of mantissa bits of a width."""
    mantissa, exponent = math.frexp(value)
    return math.ldexp(math.ceil(mantissa * 2**_WIDTH_BITS), exponent - _WIDTH_BITS)
