"""A draw of any noise, on any device."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hush.core.part import Noise
from hush.core.randomness import source_for

if TYPE_CHECKING:
    import torch


def sample(
    noise: Noise,
    shape: Sequence[int],
    norm: float = 1.0,
    location: "torch.Tensor | None" = None,
    generator: "torch.Generator | None" = None,
    device: "torch.device | str | None" = None,
    secure: bool = False,
) -> "torch.Tensor":
    """A tensor of `shape` drawn around `location` (zero by default) for a clipping norm of `norm`.

    `secure` takes every random bit from the operating system's cryptographic source.

    >>> import hush, torch
    >>> hush.noise.sample(hush.Gaussian(multiplier=2.0), (3,), norm=0.5).shape
    torch.Size([3])
    """
    import torch

    around = torch.zeros(shape, device=device)
    if location is not None:
        around = around.to(device or location.device, location.dtype) + location
    return noise.around(around, norm=norm, generator=source_for(around.device, generator, secure=secure))
