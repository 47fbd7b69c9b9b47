"""Scattering transform of small images (Bruna and Mallat 2013): moduli of wavelets, averaged.

Two scales, eight angles, two orders: 81 channels a colour, at a quarter of the size. Each image is
transformed on its own and nothing is learned, so that the features need no privacy of their own.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ANGLES = 8
CHANNELS = 1 + 2 * ANGLES + ANGLES**2
STEP = 4
"""Stride of the averages in pixels; images are padded by as many on each side."""

# The usual Morlet wavelets: one octave apart, half as long as they are wide.
_WIDTH, _FREQUENCY, _SLANT = 0.8, 3 * math.pi / 4, 4 / ANGLES


@dataclass(frozen=True)
class Filters:
    """The wavelets in the Fourier domain, and the averages as matrices, for images of one size."""

    fine: "Tensor"
    """Angles x side x side."""
    coarse: "Tensor"
    """Angles x 2 x side/2 x 2 x side/2: subsampling by two sums over both axes of length 2."""
    average: "Tensor"
    """Positions x side: low-pass filter at every fourth pixel, along one axis."""
    average_half: "Tensor"
    """Positions x side/2: low-pass filter on every other pixel."""


def scatter(images: "Tensor") -> "Tensor":
    """Images N x C x side x side as features N x 81 C x side/4 x side/4, on the images' device.

    The order of the 81 is that of kymatio: the average; the fine and the coarse wavelets, angle by
    angle; then the coarse wavelets of each fine one.
    """
    import torch
    from torch.nn import functional

    filters = _filters(check_side(images.shape[1:]), images.device)
    batch, colours, side, _ = images.shape
    plain = functional.pad(images.reshape(-1, 1, side, side).float(), [STEP] * 4, mode="reflect")
    spectrum = torch.fft.fft2(plain)
    fine = torch.fft.ifft2(spectrum * filters.fine).abs()
    coarse = _halved(spectrum, filters.coarse).flatten(1, 2)
    second = _halved(torch.fft.fft2(fine), filters.coarse).flatten(1, 2)
    averages = [
        *(filters.average @ modulus @ filters.average.T for modulus in (plain, fine)),
        *(filters.average_half @ modulus @ filters.average_half.T for modulus in (coarse, second)),
    ]
    return torch.cat(averages, 1).view(batch, colours * CHANNELS, side // STEP, side // STEP)


def check_side(shape: Sequence[int]) -> int:
    """The side of images of this shape; raises for what cannot be transformed."""
    side = shape[-1]
    if len(shape) != 3 or shape[-2] != side or side % STEP or side <= STEP:
        raise DataError(
            f"images of {' x '.join(map(str, shape))} cannot be scattered: they must be channels x side "
            f"x side, the side a multiple of {STEP} above {STEP}, as 1 x 28 x 28 or 3 x 32 x 32."
        )
    return side


def _halved(spectrum: "Tensor", wavelets: "Tensor") -> "Tensor":
    """Modulus of each wavelet's response at every other pixel, with a new axis for the wavelets."""
    import torch

    half = wavelets.shape[-1]
    blocks = spectrum.unflatten(-1, (2, half)).unflatten(-3, (2, half)).unsqueeze(2)
    # Subsampling by two in space aliases the spectrum: its halves are averaged.
    folded = sum(
        blocks[..., row, :, column, :] * wavelets[:, row, :, column, :]
        for row in range(2)
        for column in range(2)
    )
    response: Tensor = torch.fft.ifft2(folded).abs()
    return response


@lru_cache(maxsize=8)
def _filters(side: int, device: "torch.device") -> Filters:
    """The filter bank for one image size, computed in double precision and stored in single."""
    import torch

    padded = side + 2 * STEP
    half = padded // 2
    fine, coarse = (
        np.stack([_wavelet(padded, octave, angle) for angle in range(ANGLES)]) for octave in (1, 2)
    )
    gaussian = np.exp(-(_positions(padded) ** 2) / (2 * (2 * _WIDTH) ** 2))
    smooth = np.fft.fft(_wrapped(gaussian, padded)).real / (math.sqrt(2 * math.pi) * 2 * _WIDTH)
    # At half the points the average keeps the lower half of its spectrum.
    smooth_half = np.concatenate([smooth[: half // 2 + 1], smooth[padded - half // 2 + 1 :]])

    def put(array: NDArray[np.float64]) -> "Tensor":
        return torch.from_numpy(array).to(device, torch.float32)

    return Filters(
        put(fine),
        put(coarse.reshape(ANGLES, 2, half, 2, half) / 4),
        put(_averages(smooth, STEP)),
        put(_averages(smooth_half, STEP // 2)),
    )


def _wavelet(side: int, octave: int, angle: int) -> NDArray[np.float64]:
    """Morlet wavelet in the Fourier domain: a wave under a Gaussian, corrected to zero mean."""
    width = _WIDTH * octave
    turn = (ANGLES // 2 - 1 - angle) * math.pi / ANGLES
    down, right = np.meshgrid(_positions(side), _positions(side), indexing="ij")
    along = down * math.cos(turn) + right * math.sin(turn)
    across = right * math.cos(turn) - down * math.sin(turn)
    bell = np.exp(-(along**2 + (_SLANT * across) ** 2) / (2 * width**2))
    wave = _wrapped(_wrapped(bell * np.exp(1j * _FREQUENCY / octave * along), side).T, side).T
    bell = _wrapped(_wrapped(bell, side).T, side).T
    wave -= wave.sum() / bell.sum() * bell
    spectrum: NDArray[np.float64] = np.fft.fft2(wave).real * _SLANT / (2 * math.pi * width**2)
    return spectrum


def _positions(side: int) -> NDArray[np.float64]:
    """Pixel positions of a periodic image, two periods to either side."""
    return np.arange(-2.0 * side, 3.0 * side)


def _wrapped(values: NDArray[Any], side: int) -> NDArray[Any]:
    """The sum over the periods of the first axis."""
    total: NDArray[Any] = values.reshape(-1, side, *values.shape[1:]).sum(0)
    return total


def _averages(spectrum: NDArray[np.float64], step: int) -> NDArray[np.float64]:
    """Matrix of the circular convolution with a filter, at every `step`-th position inside the image."""
    filter_ = np.fft.ifft(spectrum).real
    points = np.arange(len(filter_))
    inside = np.arange(step, len(filter_) - step, step)
    return np.asarray(filter_[(inside[:, None] - points) % len(filter_)])
