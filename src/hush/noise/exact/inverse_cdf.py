"""Noise of density proportional to exp(-(|x| / scale)^beta) on a GPU, drawn and added in one kernel.

The inverse of the cdf by pieces, and a correction that makes the law exact: docs/guarantees/sampling.md.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.polynomial import polynomial
from numpy.typing import NDArray

from hush.core.randomness import Randomness, cryptographic, has_triton, random_bits

if TYPE_CHECKING:
    import torch

DEGREE = 5
PIECES = 8
"""Pieces of equal length in each octave of the probability."""
OCTAVES = 88
CORRECTION = 2.0**-21
"""Largest relative error of the proposal's density that the kernel corrects."""

_MAX_COUNT = 2**33
"""Numbers that one call can draw: a 32-bit counter for each two of them."""


@dataclass(frozen=True)
class Pieces:
    """Inverse cdf of |x| as piecewise polynomials of its lower or upper tail probability in (0, 1/2).

    A table has a row a power and a column a piece: first those of the middle, then those of the tail,
    each from the largest chance to the smallest.
    """

    beta: float
    exact: NDArray[np.float64]
    off: float
    """Largest relative error of the proposal's density."""


def fits(location: "torch.Tensor", beta: float, generator: Randomness) -> bool:
    """Whether the kernel can add noise to this tensor."""
    import torch

    return (
        location.device.type == "cuda"
        and location.dtype == torch.float32
        and location.is_contiguous()
        and 0 < location.numel() < _MAX_COUNT
        and not cryptographic(generator)
        and generator.device.type == "cuda"
        and (generator.device.index or 0) == (location.device.index or 0)
        and has_triton()
        and pieces(beta).off <= CORRECTION
    )


def add_noise(
    location: "torch.Tensor", beta: float, scale: float, generator: Randomness
) -> "torch.Tensor":
    """`location` plus independent noise of density ~ exp(-(|x| / scale)^beta), in place.

    **Guarantee.** The law is exact but for rounding in single precision: docs/guarantees/sampling.md.
    128 bits of the generator are the key and the counter's start; the same ones repeat the draw.
    """
    from hush.noise.exact import inverse_cdf_kernel

    single, double = _tables(beta, location.device)
    return inverse_cdf_kernel.add_noise(location, scale, single, double, random_bits(2, generator))


@lru_cache(maxsize=64)
def pieces(beta: float) -> Pieces:
    """The polynomials, which meet the inverse of the cdf at six points of each piece, ends included."""
    nodes = (1 - np.cos(np.pi * np.arange(DEGREE + 1) / DEGREE)) / 2
    inverse = np.linalg.inv(np.vander(nodes, increasing=True))
    octave, piece = np.divmod(np.arange(OCTAVES * PIECES), PIECES)
    begin, length = 2.0 ** -(octave + 2) * (2 - (piece + 1) / PIECES), 2.0 ** -(octave + 2) / PIECES
    chance = begin + length * nodes[:, None]
    exact = np.concatenate([inverse @ _middle(beta, chance), inverse @ _tail(beta, chance)], axis=1)
    between = np.linspace(0, 1, 17)[:, None, None]
    place = polynomial.polyval(between, exact, tensor=False)[:, 0]
    slope = polynomial.polyval(between, polynomial.polyder(exact), tensor=False)[:, 0]
    density = np.exp(-(place**beta)) / math.gamma(1 + 1 / beta)
    off = np.abs(density * np.abs(slope) / np.concatenate([length, length]) - 1)
    return Pieces(beta, exact, float(off.max()))


def _tail(beta: float, chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Upper quantiles of |x|: exceeded with probability `chance`."""
    from scipy.special import gammainccinv

    return np.asarray(gammainccinv(1 / beta, chance) ** (1 / beta))


def _middle(beta: float, chance: NDArray[np.float64]) -> NDArray[np.float64]:
    """Lower quantiles of |x|: not exceeded with probability `chance`."""
    from scipy.special import gammaincinv

    # Where the density is level to the last bit; there its integral would underflow.
    level = chance * math.gamma(1 + 1 / beta)
    return np.where(level**beta < 1e-17, level, gammaincinv(1 / beta, chance) ** (1 / beta))


@lru_cache(maxsize=64)
def _tables(beta: float, device: "torch.device") -> "tuple[torch.Tensor, torch.Tensor]":
    """The polynomials in both precisions; the double ones after beta and the height of the density."""
    import torch

    exact = pieces(beta).exact
    law = np.array([beta, 1 / math.gamma(1 + 1 / beta)])
    double = torch.from_numpy(np.concatenate([law, exact.ravel()])).to(device)
    return torch.from_numpy(exact.astype(np.float32)).to(device), double
