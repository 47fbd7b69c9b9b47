"""Laplace noise."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hush.core.part import Noise
from hush.noise.gaussian import MULTIPLIER

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Laplace(Noise):
    """Independent noise of density proportional to exp(-|x| / s), s = `multiplier` times the norm."""

    multiplier: float = field(metadata=MULTIPLIER)

    def around(
        self, location: "torch.Tensor", *, norm: float, generator: "torch.Generator"
    ) -> "torch.Tensor":
        import torch

        size = torch.empty(location.shape, device=generator.device, dtype=location.dtype)
        size.exponential_(generator=generator)
        # A sign drawn on its own, so that each half of the line has the exponential's full precision.
        side = torch.empty_like(size).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
        return location.add(size.mul_(side).to(location.device), alpha=self.multiplier * norm)
