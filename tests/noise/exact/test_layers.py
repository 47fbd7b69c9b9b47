"""The covering that exact draws are rejected from, against 50-digit arithmetic."""

import math
from decimal import Decimal, localcontext
from fractions import Fraction

import numpy as np
import pytest

from hush.noise.exact.layers import LAYERS, PLACE_BITS, Layers, layers

BETAS = (1.0, 1.2, 1.5, 2.0, 2.33, 4.0, 12.0, 100.0, 1e4)


def exact(value: float) -> Decimal:
    return Decimal(float(value))


def widths(law: Layers) -> list[Decimal]:
    return [exact(cell) * 2**PLACE_BITS for cell in law.cells]


@pytest.mark.parametrize("beta", BETAS)
def test_layers_have_equal_areas_and_cover_the_curve(beta: float) -> None:
    law = layers(beta)
    with localcontext(prec=50):
        wide, heights = widths(law), law.heights
        assert len(wide) == LAYERS
        assert heights[-1] >= 1
        areas = [w * (b - a) for w, a, b in zip(wide, heights, heights[1:], strict=False)]
        assert max(areas) - min(areas) < Decimal("1e-44") * areas[0]
        for k in range(1, LAYERS):
            assert law.curve(wide[k]) <= heights[k], "beside the layers above it"
        for k in range(LAYERS):
            if law.inner[k] > 0:
                assert law.curve(exact(law.inner[k])) >= heights[k + 1], "under the curve as a whole"
        # a table one part in ten thousand narrower would leave some of the curve out
        assert any(law.curve(wide[k] * Decimal("0.9999")) > heights[k] for k in range(1, LAYERS))


@pytest.mark.parametrize("beta", BETAS)
def test_strips_cover_the_tail_and_have_the_area_of_their_part_of_the_base(beta: float) -> None:
    law = layers(beta)
    with localcontext(prec=50):
        wide = widths(law)
        first = law.heights[1]
        # strips of widths b and heights h, h/2, h/4, ... against what layer 0 has beyond the edge
        assert 2 * exact(law.strip) * first == (wide[0] - exact(law.edge)) * first
        for j, (begin, after) in enumerate(zip(law.strips, law.strips[1:], strict=False)):
            assert law.curve(exact(begin)) <= first / 2**j
            assert 0 <= after - begin <= law.strip


@pytest.mark.parametrize("beta", BETAS)
def test_places_are_exact_doubles(beta: float) -> None:
    law = layers(beta)
    largest = 2**PLACE_BITS
    for cell in law.cells.tolist():
        for place in (largest, largest - 1, -largest, 12345):
            assert Fraction(place * cell) == place * Fraction(cell)
    cell = law.strip * 2.0**-law.tail_bits
    for begin in law.strips.tolist():
        for place in (1, 2**law.tail_bits - 1):
            assert Fraction(begin + place * cell) == Fraction(begin) + place * Fraction(cell)


@pytest.mark.parametrize("beta", [1.0, 2.0, 4.0])
def test_hardly_anything_is_drawn_again(beta: float) -> None:
    law = layers(beta)
    covered = LAYERS * float(law.heights[1] * widths(law)[0])
    assert 0.99 < math.gamma(1 + 1 / beta) / covered < 1
    assert np.mean(law.inner / (law.cells * 2.0**PLACE_BITS)) > 0.99
