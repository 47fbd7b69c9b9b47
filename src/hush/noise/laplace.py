"""Laplace noise."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hush.core.part import Noise
from hush.core.randomness import Randomness
from hush.noise import ziggurat
from hush.noise.gaussian import MULTIPLIER

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Laplace(Noise):
    """Independent noise of density proportional to exp(-|x| / s), s = `multiplier` times the norm."""

    additive: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    multiplier: float = field(metadata=MULTIPLIER)

    def around(self, location: "torch.Tensor", *, norm: float, generator: Randomness) -> "torch.Tensor":
        return ziggurat.around(location, 1.0, self.multiplier * norm, generator)

    def prepare(
        self, count: int, *, norm: float, generator: Randomness, device: "torch.device"
    ) -> "Callable[[torch.Tensor], torch.Tensor]":
        return ziggurat.prepare(1.0, count, self.multiplier * norm, generator, device)
