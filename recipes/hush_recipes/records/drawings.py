"""Pairs of images drawn by a formula from a public seed: a stand-in for the records' second moments.

No record, and no other image, enters. The images of a pair show one thing twice: what differs within
pairs is what a classifier should not mind. `shapes` are filled outlines with a texture, as clothes on
black are; `strokes` are smooth lines with a pen of one width, as written digits are.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Draw = Callable[[int, torch.Generator], tuple[Tensor, Tensor]]
"""Two images N x 1 x 28 x 28 of values 0 to 1 of each thing, on the CPU, from the number of things."""

SIDE = 28
_MIDDLE = (SIDE - 1) / 2
_HALF = 9.5
"""Half the height of a stroke in pixels."""
_POINTS, _HARMONICS = 60, 3
"""Of a stroke: where its pen is put down, and the terms of its coordinates' series."""
_AT_ONCE = 500


def shapes(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Rounded outlines with a rough edge, most of them symmetric, filled with a random texture.

    Args:
        count: how many pairs; within one, the texture is another, and the outline almost the same.
        source: of their sizes, edges and textures.
    """
    edge = _random_field(uniform(count, 1.5, 3.0, source), source)
    symmetric = uniform(count, 0.0, 1.0, source) < 0.6
    edge = torch.where(symmetric, (edge + edge.flip(2)) / 2, edge)
    edge = edge * uniform(count, 0.2, 1.0, source)
    width, height = uniform(count, 0.3, 1.1, source), uniform(count, 0.4, 1.2, source)
    roundness = uniform(count, 0.5, 2.0, source)
    axis = torch.linspace(-1, 1, SIDE).abs()

    def filled() -> Tensor:
        across, down = (axis / (size * _around(1, 0.08, count, source)) for size in (width, height))
        rough = edge + 0.1 * _random_field(uniform(count, 1.5, 3.0, source), source)
        outline = roundness * (1 - across**3 - down.mT**3) + rough
        texture = _random_field(uniform(count, 0.3, 2.5, source), source)
        brightness = texture * uniform(count, 0.02, 0.3, source) + uniform(count, 0.3, 0.9, source)
        covered = torch.sigmoid(outline * uniform(count, 3.0, 15.0, source))
        return (covered * brightness).clamp(0, 1)[:, None]

    return filled(), filled()


def strokes(count: int, source: torch.Generator) -> tuple[Tensor, Tensor]:
    """Smooth lines, as high as digits are, drawn with a pen of their own width.

    Args:
        count: how many pairs; within one, lines are bent, turned, slanted and moved a little.
        source: of their curves, widths and pens.
    """
    harmonics = torch.arange(1, _HARMONICS + 1.0)[:, None]
    size = torch.randn(count, 2, _HARMONICS, 1, generator=source) / harmonics
    phase = 2 * math.pi * torch.rand(count, 2, _HARMONICS, 1, generator=source)
    length = 0.3 + 0.7 * torch.rand(count, 2, 1, 1, generator=source)
    width, pen = uniform(count, 2.0, _HALF - 0.5, source)[:, 0], uniform(count, 0.9, 2.0, source)
    time = 2 * math.pi * harmonics * torch.linspace(0, 1, _POINTS) * length

    def written() -> Tensor:
        bent = size + 0.12 * torch.randn(size.shape, generator=source) / harmonics
        moved = phase + 0.15 * torch.randn(phase.shape, generator=source)
        curve = (bent * torch.sin(time + moved)).sum(2)
        curve = curve - (curve.amax(2, keepdim=True) + curve.amin(2, keepdim=True)) / 2
        curve = curve / curve.abs().amax(2, keepdim=True)
        x, y = curve[:, 0] * width * _around(1, 0.1, count, source)[:, 0], _HALF * curve[:, 1]
        angle, slant = (_around(0, share, count, source)[:, 0] for share in (0.15, 0.2))
        x, y = x * angle.cos() - y * angle.sin() + slant * y, x * angle.sin() + y * angle.cos()
        y = y * _HALF / y.abs().amax(1, keepdim=True).clamp(min=5)
        x, y = (axis + _around(_MIDDLE, 0.6, count, source)[:, 0] for axis in (x, y))
        return _lines(x, y, (pen * _around(1, 0.2, count, source)).clamp(0.7, 2.4))

    return written(), written()


def _lines(x: Tensor, y: Tensor, pen: Tensor) -> Tensor:
    """Images of lines through points of these coordinates, with pens of these radii."""
    pixels = torch.arange(float(SIDE))
    images = torch.empty(len(x), 1, SIDE, SIDE)
    for begin in range(0, len(x), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        columns, rows = ((pixels - axis[some, :, None]).square() for axis in (x, y))
        distance = (columns[:, :, None, :] + rows[:, :, :, None]).amin(1).sqrt()
        images[some, 0] = torch.sigmoid(3 * (pen[some] - distance))
    return images


def uniform(count: int, low: float, high: float, source: torch.Generator) -> Tensor:
    """A number for each image, of shape N x 1 x 1."""
    return low + (high - low) * torch.rand(count, 1, 1, generator=source)


def _around(centre: float, deviation: float, count: int, source: torch.Generator) -> Tensor:
    """A normal number for each image, of shape N x 1 x 1."""
    return centre + deviation * torch.randn(count, 1, 1, generator=source)


def _random_field(smoothness: Tensor, source: torch.Generator) -> Tensor:
    """Gaussian random fields of mean 0 and variance 1, amplitudes by that power of the wavelength."""
    wide = 2 * SIDE
    frequency = torch.fft.fftfreq(wide) * wide
    radius = torch.hypot(frequency, frequency[:, None]).clamp(min=1)
    white = torch.randn(len(smoothness), wide, wide, generator=source)
    field: Tensor = torch.fft.ifft2(torch.fft.fft2(white) * radius**-smoothness).real[:, :SIDE, :SIDE]
    field = field - field.mean((1, 2), keepdim=True)
    return field / field.std((1, 2), keepdim=True)
