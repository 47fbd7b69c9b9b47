"""Gaussian noise."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from hush.core.parts import Noise
from hush.core.randomness import Randomness, cryptographic
from hush.core.ranges import number
from hush.noise import ziggurat

if TYPE_CHECKING:
    import torch
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Self

from hush.core.errors import InvalidValue, Unsupported, short_repr
from hush.core.sensitivity import SensitivitySet

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

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: Randomness
    ) -> "torch.Tensor":
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

        noise = self.privatize(torch.zeros(count, device=device), norm=norm, generator=generator)
        return lambda location: location.add_(noise)

    def _scale(self, norm: float) -> float:
        """s in exp(-(|x| / s)^2)."""
        return self.multiplier * norm * math.sqrt(2)


_AT_ONCE = {"cpu": 2**16, "cuda": 2**26}
"""Numbers drawn at once: on the CPU few enough to stay in the cache until they are added."""


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

    def per_block(self, balls: Sequence[SensitivitySet], unit: float) -> list[tuple[Noise, float]]:
        if len(balls) != len(self.multipliers):
            raise InvalidValue(
                f"multipliers={short_repr(self.multipliers)} must have {len(balls)} numbers, one for "
                "each block that is clipped: a block without noise would not be hidden.",
                key="multipliers",
            )
        return [
            (Gaussian(multiplier=each), ball.l2_radius)
            for each, ball in zip(self.multipliers, balls, strict=True)
        ]

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: Randomness
    ) -> "torch.Tensor":
        raise Unsupported(
            "BlockGaussian is noise for the blocks of a clipping, and a draw on its own has none. Draw "
            "each block with Gaussian."
        )
