"""The sign of a normal draw."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from hush.core.part import Noise
from hush.core.randomness import Randomness
from hush.noise.gaussian import Gaussian
from hush.noise.rectified import SCALE

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class StochasticSign(Noise):
    """-1 or 1: the sign of a normal draw around the sum, of standard deviation `scale` (absolute)."""

    exact: ClassVar[bool] = True

    scale: float = field(metadata=SCALE)

    def with_multiplier(self, multiplier: float) -> Self:
        return replace(self, scale=multiplier)

    def around(self, location: "torch.Tensor", *, norm: float, generator: Randomness) -> "torch.Tensor":
        noisy = Gaussian(multiplier=self.scale).around(location, norm=1.0, generator=generator)
        # torch.sign(0) is 0, a third outcome that has no probability in the law that is charged
        return noisy.ge_(0).mul_(2).sub_(1)
