"""Gaussian noise."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hush.core.number import number
from hush.core.part import Noise
from hush.core.randomness import Randomness, cryptographic
from hush.noise import ziggurat

if TYPE_CHECKING:
    import torch

MULTIPLIER = number(
    at_least=1e-12,
    at_most=1e15,
    why="without noise the update is a function of the records and nothing is private, and noise beyond "
    "any number leaves nothing to train",
    example=1.0,
)


@dataclass(frozen=True, kw_only=True)
class Gaussian(Noise):
    """Independent normal noise of standard deviation `multiplier` times the clipping norm."""

    additive: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    multiplier: float = field(metadata=MULTIPLIER)

    def around(self, location: "torch.Tensor", *, norm: float, generator: Randomness) -> "torch.Tensor":
        import torch

        if cryptographic(generator):
            return ziggurat.around(location, 2.0, self._scale(norm), generator)
        kind: Any = {"generator": generator, "device": generator.device, "dtype": location.dtype}
        for part in location.view(-1).split(_AT_ONCE[location.device.type]):
            part.add_(torch.randn(len(part), **kind).to(part.device), alpha=self.multiplier * norm)
        return location

    def prepare(
        self, count: int, *, norm: float, generator: Randomness, device: "torch.device"
    ) -> "Callable[[torch.Tensor], torch.Tensor]":
        if cryptographic(generator):
            return ziggurat.prepare(2.0, count, self._scale(norm), generator, device)
        import torch

        noise = self.around(torch.zeros(count, device=device), norm=norm, generator=generator)
        return lambda location: location.add_(noise)

    def _scale(self, norm: float) -> float:
        """s in exp(-(|x| / s)^2)."""
        return self.multiplier * norm * math.sqrt(2)


_AT_ONCE = {"cpu": 2**16, "cuda": 2**26}
"""Numbers drawn at once: on the CPU few enough to stay in the cache until they are added."""
