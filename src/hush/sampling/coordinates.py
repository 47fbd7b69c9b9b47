"""Coordinate sampling, alone and after Poisson sampling of records."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hush.core.parts import Proof, Sampling
from hush.core.randomness import RandomSource, random_bits
from hush.core.value import Range
from hush.sampling.poisson import RATE, FullBatch, Poisson

if TYPE_CHECKING:
    import torch

_BYTES = 256
_RATE = Range(
    at_least=1 / 512,
    at_most=1,
    why="it is the probability that a coordinate of a record takes part, which one random byte decides",
    example=0.5,
)

_PROOFS = (
    Proof(
        clippings=("L2", "Linf", "L2Linf", "Box", "Subspaces"),
        noises=("Gaussian",),
        note="twice-sampling.md",
    ),
    Proof(clippings=("L2", "Box", "Subspaces"), noises=("BlockGaussian",), note="twice-sampling.md"),
)


def _exact(name: str, rate: object) -> float:
    """The nearest positive multiple of 1/256, which one random byte runs exactly."""
    return max(1, round(_RATE.check(name, rate) * _BYTES)) / _BYTES


def _masked(values: "torch.Tensor", rate: float, generator: RandomSource) -> "torch.Tensor":
    """Finite values in place, each kept if its random byte is below 256 times the rate, and else 0."""
    import torch

    words = random_bits(-(-values.numel() // 8), generator)
    # compared with 255 at most: a byte compared with 256 would be compared with 0
    mask = words.view(torch.uint8)[: values.numel()].le_(round(rate * _BYTES) - 1)
    # bytes of 0 and 1: booleans, and masked_fill_(), take many times as long
    return values.mul_(mask.to(values.device).view_as(values))


@dataclass(frozen=True, kw_only=True)
class Coordinate(Sampling):
    """Every record takes part in each coordinate with probability `rate`, independently of all others.

    Args:
        rate: Rounded to a multiple of 1/256, which one random byte runs exactly.
    """

    proofs: ClassVar[tuple[Proof, ...]] = _PROOFS

    rate: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "rate", _exact("rate", self.rate))

    @property
    def participation(self) -> float:
        return 1.0

    @property
    def coordinate_participation(self) -> float:
        return self.rate

    def draw(self, records: int, generator: RandomSource) -> "torch.Tensor":
        return FullBatch().draw(records, generator)

    def mask_coordinates(self, values: "torch.Tensor", generator: RandomSource) -> "torch.Tensor":
        return _masked(values, self.rate, generator)


@dataclass(frozen=True, kw_only=True)
class Twice(Sampling):
    """Twice sampling: Poisson sampling of records, then of the coordinates of each, independently.

    Args:
        rate: Probability that a record takes part.
        coordinate_rate: Probability that a coordinate of it does, rounded to a multiple of 1/256.
    """

    proofs: ClassVar[tuple[Proof, ...]] = _PROOFS

    rate: float = field(metadata=RATE)
    coordinate_rate: float

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "coordinate_rate", _exact("coordinate_rate", self.coordinate_rate))

    @property
    def participation(self) -> float:
        return self.rate

    @property
    def coordinate_participation(self) -> float:
        return self.coordinate_rate

    def draw(self, records: int, generator: RandomSource) -> "torch.Tensor":
        return Poisson(rate=self.rate).draw(records, generator)

    def mask_coordinates(self, values: "torch.Tensor", generator: RandomSource) -> "torch.Tensor":
        return _masked(values, self.coordinate_rate, generator)
