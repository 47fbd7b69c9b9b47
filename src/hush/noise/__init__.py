"""Noise distributions and their samplers, with one file per family."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hush.core.errors import InvalidValue
from hush.core.parts import Noise
from hush.core.randomness import source_for
from hush.core.value import check_kind, number
from hush.noise.bounded import Quantized, Rectified, StochasticSign, Truncated
from hush.noise.correlated import Banded
from hush.noise.gaussian import BlockGaussian, Gaussian, GeneralizedGaussian, Laplace

if TYPE_CHECKING:
    import torch

__all__ = [
    "Banded",
    "BlockGaussian",
    "Gaussian",
    "GeneralizedGaussian",
    "Laplace",
    "Quantized",
    "Rectified",
    "StochasticSign",
    "Truncated",
]

_NORM = number(
    above=0,
    at_most=1e12,
    why="it is the unit of the noise multiplier, and a release without noise is not private",
    example=1.0,
)["range"]


def sample(
    noise: Noise,
    shape: Sequence[int],
    norm: float = 1.0,
    location: "torch.Tensor | None" = None,
    generator: "torch.Generator | None" = None,
    device: "torch.device | str | None" = None,
) -> "torch.Tensor":
    """Draw independent noise and add it to `location`.

    Args:
        noise: Noise distribution.
        shape: Shape of the result.
        norm: Clipping norm that scales the noise.
        location: Values to add noise to; zero by default. Required for noise with bounded support.
        generator: Source of the seed. The seed reveals the noise, so it must stay secret.
        device: Device of the result; by default the device of `location`.

    Returns:
        A tensor of `shape`.

    >>> import hush, torch
    >>> hush.noise.sample(hush.Gaussian(multiplier=2.0), (3,), norm=0.5).shape
    torch.Size([3])
    """
    import torch

    check_kind("noise", noise, Noise)  # type: ignore[type-abstract]
    _NORM.check("norm", norm)
    if location is not None and not location.is_floating_point():
        raise InvalidValue(
            f"location of type {location.dtype} must be real floating-point numbers: the imaginary part "
            "of complex numbers would get no noise, and integers would round the noise. Pass e.g. "
            "location.double(), or torch.view_as_real(location).",
            key="location",
        )
    if location is None and not noise.additive:
        raise InvalidValue(
            f"{type(noise).__name__} has bounded support and needs the location: if a draw around 0 "
            "were added to a value later, the range of the sum would reveal the value. "
            "Pass location=value.",
            key="location",
        )
    around = torch.zeros(shape, device=device)
    if location is not None:
        around = around.to(device or location.device, location.dtype) + location
    source = source_for(around.device, generator)
    return noise.privatize(around, norm=norm, generator=source)
