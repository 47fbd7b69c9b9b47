"""Images drawn by a formula from a public seed: a stand-in for the records where only statistics count.

No record, and no other image, enters. `shapes` are filled outlines with a texture, as clothes on black
are; `strokes` are smooth lines with a pen of one width, as written digits are.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

Draw = Callable[[int, torch.Generator], Tensor]
"""Images N x 1 x 28 x 28 of values 0 to 1, on the CPU, from their number and a source."""

SIDE = 28
_POINTS = 60
"""Points of a stroke at which its pen is put down."""
_HARMONICS = 3
_AT_ONCE = 500


def shapes(count: int, source: torch.Generator) -> Tensor:
    """Rounded outlines with a rough edge, most of them symmetric, filled with a random texture.

    Args:
        count: how many.
        source: of their sizes, edges and textures.
    """
    axis = torch.linspace(-1, 1, SIDE).abs()
    edge = _random_field(_uniform(count, 1.5, 3.0, source), source)
    symmetric = _uniform(count, 0.0, 1.0, source) < 0.6
    edge = torch.where(symmetric, (edge + edge.flip(2)) / 2, edge)
    width, height = _uniform(count, 0.3, 1.1, source), _uniform(count, 0.4, 1.2, source)
    outline = 1 - (axis / width) ** 3 - (axis[:, None] / height) ** 3
    outline = outline * _uniform(count, 0.5, 2.0, source) + edge * _uniform(count, 0.2, 1.0, source)
    texture = _random_field(_uniform(count, 0.3, 2.5, source), source)
    brightness = texture * _uniform(count, 0.02, 0.3, source) + _uniform(count, 0.3, 0.9, source)
    filled = torch.sigmoid(outline * _uniform(count, 3.0, 15.0, source))
    return (filled * brightness).clamp(0, 1)[:, None]


def strokes(count: int, source: torch.Generator) -> Tensor:
    """One smooth line each, as high as digits are, drawn with a pen of its own width.

    Args:
        count: how many.
        source: of their curves, widths and pens.
    """
    across = _curve(count, source) * _uniform(count, 2.0, 9.0, source)[:, 0] + (SIDE - 1) / 2
    down = _curve(count, source) * 9.5 + (SIDE - 1) / 2
    pen = _uniform(count, 0.9, 2.0, source)
    pixels = torch.arange(float(SIDE))
    images = torch.empty(count, 1, SIDE, SIDE)
    for begin in range(0, count, _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        columns = (pixels - across[some, :, None]).square()
        rows = (pixels - down[some, :, None]).square()
        distance = (columns[:, :, None, :] + rows[:, :, :, None]).amin(1).sqrt()
        images[some, 0] = torch.sigmoid(3 * (pen[some] - distance))
    return images


def _uniform(count: int, low: float, high: float, source: torch.Generator) -> Tensor:
    """A number for each image, of shape N x 1 x 1."""
    return low + (high - low) * torch.rand(count, 1, 1, generator=source)


def _random_field(smoothness: Tensor, source: torch.Generator) -> Tensor:
    """Gaussian random fields of mean 0 and variance 1, amplitudes by that power of the wavelength."""
    wide = 2 * SIDE
    frequency = torch.fft.fftfreq(wide) * wide
    radius = torch.hypot(frequency, frequency[:, None]).clamp(min=1)
    white = torch.randn(len(smoothness), wide, wide, generator=source)
    field: Tensor = torch.fft.ifft2(torch.fft.fft2(white) * radius**-smoothness).real[:, :SIDE, :SIDE]
    field = field - field.mean((1, 2), keepdim=True)
    return field / field.std((1, 2), keepdim=True)


def _curve(count: int, source: torch.Generator) -> Tensor:
    """One coordinate along a line, N x points, from -1 to 1: a sum of a few random harmonics."""
    harmonics = torch.arange(1, _HARMONICS + 1.0)[:, None]
    size = torch.randn(count, _HARMONICS, 1, generator=source) / harmonics
    phase = 2 * math.pi * torch.rand(count, _HARMONICS, 1, generator=source)
    time = torch.linspace(0, 1, _POINTS) * _uniform(count, 0.3, 1.0, source)
    values = (size * torch.sin(2 * math.pi * harmonics * time + phase)).sum(1)
    values = values - (values.amax(1, keepdim=True) + values.amin(1, keepdim=True)) / 2
    return values / values.abs().amax(1, keepdim=True)
