"""A normal draw rounded to the nearest of a few levels."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from hush.core.errors import InvalidValue
from hush.core.number import check_count
from hush.core.part import Noise
from hush.core.randomness import Randomness
from hush.noise.gaussian import Gaussian
from hush.noise.rectified import BOUND, SCALE

if TYPE_CHECKING:
    import torch

MOST_LEVELS = 2**16


@dataclass(frozen=True, kw_only=True)
class Quantized(Noise):
    """A normal draw around the sum, of standard deviation `scale`, rounded to the nearest of `levels`
    evenly spaced numbers from -bound to bound.

    With two levels it is `bound` times `StochasticSign`; with more and more it tends to `Rectified`.
    """

    exact: ClassVar[bool] = True

    scale: float = field(metadata=SCALE)
    bound: float = field(metadata=BOUND)
    levels: int

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "with one level nothing is said"
        object.__setattr__(self, "levels", check_count("levels", self.levels, why, at_least=2))
        if self.levels > MOST_LEVELS:
            raise InvalidValue(
                f"levels={self.levels} must be <= {MOST_LEVELS}: single precision does not tell more of "
                f"them apart, so the draw would not be the one that is charged. Use Rectified.",
                key="levels",
            )

    def with_multiplier(self, multiplier: float) -> Self:
        return replace(self, scale=multiplier)

    def around(self, location: "torch.Tensor", *, norm: float, generator: Randomness) -> "torch.Tensor":
        import torch

        noisy = Gaussian(multiplier=self.scale).around(location, norm=1.0, generator=generator)
        spacing = 2 * self.bound / (self.levels - 1)
        # in double precision, for the level's number is exact in no smaller type
        level = noisy.to(torch.float64).add_(self.bound).div_(spacing).round_()
        level = level.clamp_(0, self.levels - 1).mul_(spacing).sub_(self.bound)
        return noisy.copy_(level)
