"""Normal noise with a deviation of its own for each block of coordinates."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

from hush.core.ball import Ball
from hush.core.errors import InvalidValue, Unsupported, short_repr
from hush.core.part import Noise
from hush.core.randomness import Randomness
from hush.noise.gaussian import MULTIPLIER, Gaussian

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class BlockGaussian(Noise):
    """Independent normal noise, in block j of deviation `multipliers[j]` times that block's norm.

    The blocks are those of the clipping, and a block's norm is the Euclidean norm of the longest
    change one record can make in it.
    """

    additive: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    multipliers: Sequence[float]

    def __post_init__(self) -> None:
        given = self.multipliers
        if isinstance(given, (str, bytes)) or not isinstance(given, Sequence) or not given:
            raise InvalidValue(
                f"multipliers={short_repr(given)} must be a list of numbers, one for each block: a "
                "block without noise would not be hidden. Pass e.g. multipliers=(1.0, 2.0).",
                key="multipliers",
            )
        checked = tuple(MULTIPLIER["range"].check("multipliers", value) for value in given)
        object.__setattr__(self, "multipliers", checked)

    @property
    def multiplier(self) -> float:
        """Of plain noise that hides as much: a record may use up the norm of every block at once."""
        return 1 / math.hypot(*(1 / each for each in self.multipliers))

    def with_multiplier(self, multiplier: float) -> Self:
        share = multiplier / self.multiplier
        return replace(self, multipliers=tuple(share * each for each in self.multipliers))

    def over(self, balls: Sequence[Ball], unit: float) -> list[tuple[Noise, float]]:
        if len(balls) != len(self.multipliers):
            raise InvalidValue(
                f"multipliers={short_repr(self.multipliers)} must have {len(balls)} numbers, one for "
                "each block that is clipped: a block without noise would not be hidden.",
                key="multipliers",
            )
        return [
            (Gaussian(multiplier=each), ball.radius)
            for each, ball in zip(self.multipliers, balls, strict=True)
        ]

    def around(self, location: "torch.Tensor", *, norm: float, generator: Randomness) -> "torch.Tensor":
        raise Unsupported(
            "BlockGaussian is noise for the blocks of a clipping, and a draw on its own has none. Draw "
            "each block with Gaussian."
        )
