"""Rectified Gaussian noise: a normal draw, cut off at the ends of a fixed support."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from hush.core.number import number
from hush.core.part import Noise
from hush.core.randomness import Randomness
from hush.noise.gaussian import Gaussian

if TYPE_CHECKING:
    import torch

SCALE = number(
    at_least=1e-12,
    at_most=1e15,
    why="it is the deviation of the noise on the sum: without noise nothing is private, and noise "
    "beyond any number leaves nothing to train",
    example=4.0,
)
BOUND = number(
    at_least=1e-12,
    at_most=1e15,
    why="the support is [-bound, bound], chosen without looking at the records, and must hold something",
    example=8.0,
)


@dataclass(frozen=True, kw_only=True)
class Rectified(Noise):
    """A normal draw around the sum, of standard deviation `scale`, clamped to [-bound, bound].

    `scale` and `bound` are absolute: they are of the sum, not of the clipping norm.
    """

    exact: ClassVar[bool] = True

    scale: float = field(metadata=SCALE)
    bound: float = field(metadata=BOUND)

    def with_multiplier(self, multiplier: float) -> Self:
        return replace(self, scale=multiplier)

    def around(self, location: "torch.Tensor", *, norm: float, generator: Randomness) -> "torch.Tensor":
        noisy = Gaussian(multiplier=self.scale).around(location, norm=1.0, generator=generator)
        return noisy.clamp_(-self.bound, self.bound)
