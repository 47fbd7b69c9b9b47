"""Dead leaves: coloured shapes that cover each other, a stand-in for photographs' second moments.

Radii have a heavy tail, as sizes of things in photographs have; a leaf is an ellipse or a rounded
rectangle with a gradient of light, and some have stripes. No record, and no other image, enters.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hush_recipes.records.drawings import uniform

SIDE = 32
_FINE = 2
"""Images are drawn so many times larger, and averaged."""
_LEAVES = 40
_AT_ONCE = 250


def leaves(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images N x 3 x 32 x 32 of values 0 to 1 of N scenes, twice: colours and places differ a little.

    Args:
        count: how many pairs.
        source: of shapes, places and colours.
    """
    pairs = [_scenes(min(_AT_ONCE, count - done), source) for done in range(0, count, _AT_ONCE)]
    first, second = (torch.cat(images) for images in zip(*pairs, strict=True))
    return first, second


@dataclass(frozen=True)
class _Leaf:
    """One leaf of each of N scenes; numbers are N x 1 x 1, in pixels where they are lengths."""

    present: Tensor
    radius: Tensor
    flatness: Tensor
    angle: Tensor
    corners: Tensor
    """Exponent of the outline: 2 is an ellipse."""
    place: Tensor
    colour: Tensor
    light: Tensor
    stripes: Tensor
    """Numbers from 0 to 1 for height, frequency, angle and phase; 4 x N x 1 x 1."""


def _scenes(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    wide = SIDE * _FINE
    number = uniform(count, 8, _LEAVES, source)
    base = 0.2 + 0.6 * torch.rand(count, 1, 1, 1, generator=source)
    contrast = 0.2 + 0.8 * torch.rand(count, 1, 1, 1, generator=source)
    tint = 0.1 * torch.randn(count, 3, 1, 1, generator=source)
    images = [torch.zeros(count, 3, wide, wide)] * 2
    for nearness in range(_LEAVES):
        leaf = _Leaf(
            present=nearness < number,
            radius=torch.full_like(number, 2.0 * wide) if not nearness else _radii(count, wide, source),
            flatness=uniform(count, 0.3, 1, source),
            angle=uniform(count, 0, math.pi, source),
            corners=torch.where(uniform(count, 0, 1, source) < 0.6, 2.0, 8.0),
            place=wide * torch.rand(2, count, 1, 1, generator=source),
            colour=base + tint + contrast * _colours(count, source),
            light=0.25 / wide * torch.randn(2, count, 1, 1, generator=source),
            stripes=torch.rand(4, count, 1, 1, generator=source),
        )
        images = [_covered(image, leaf, source) for image in images]
    first, second = (functional.avg_pool2d(image.clamp(0, 1), _FINE) for image in images)
    return first, second


def _covered(images: Tensor, leaf: _Leaf, source: torch.Generator) -> Tensor:
    """The images with a leaf on top, moved and recoloured a little."""
    pixels = torch.arange(float(images.shape[2]))
    left, top = leaf.place + _FINE * torch.randn(leaf.place.shape, generator=source)
    colour = leaf.colour + 0.05 * torch.randn(leaf.colour.shape, generator=source)
    x, y = pixels - left, pixels[:, None] - top
    along = x * leaf.angle.cos() + y * leaf.angle.sin()
    across = (y * leaf.angle.cos() - x * leaf.angle.sin()) / leaf.flatness
    inside = sum((axis.abs() / leaf.radius) ** leaf.corners for axis in (along, across)) < 1
    height, frequency, angle, phase = leaf.stripes
    wave = torch.sin(
        (0.1 + 0.8 * frequency) * (x * (math.pi * angle).cos() + y * (math.pi * angle).sin())
        + 2 * math.pi * phase
    )
    shade = leaf.light[0] * x + leaf.light[1] * y + 0.4 * (0.4 - height).clamp(min=0) * wave
    painted: Tensor = torch.where((inside & leaf.present)[:, None], colour + shade[:, None], images)
    return painted


def _radii(count: int, wide: int, source: torch.Generator) -> Tensor:
    return (0.06 * wide / (uniform(count, 0, 1, source) + 0.08)).clamp(max=0.6 * wide)


def _colours(count: int, source: torch.Generator) -> Tensor:
    """Differences of brightness, and smaller ones of hue."""
    grey, hue = (torch.randn(count, size, 1, 1, generator=source) for size in (1, 3))
    return 0.35 * grey + 0.1 * hue
