"""Subsampling: which records, and which of their coordinates, take part in a step."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hush.core.parts import Proof, Sampling
from hush.core.randomness import RandomSource, bernoulli
from hush.core.value import number

if TYPE_CHECKING:
    import torch

__all__ = ["Coordinate", "FullBatch", "Poisson", "Twice"]

_WHY = "it is the probability that a record takes part, and amplification by sampling is proved for it"
RATE = number(at_least=1e-9, at_most=1, why=_WHY, example=0.01)
_WHY_BYTE = (
    "it is the probability that a coordinate of a record takes part, which one random byte decides"
)
_BYTES = number(at_least=1 / 512, at_most=1, why=_WHY_BYTE, example=0.5)["check"]
# the nearest positive multiple of 1/256, which one random byte implements exactly
_COORDINATE_RATE = {"check": lambda name, rate: max(1, round(_BYTES(name, rate) * 256)) / 256}
_CLIPPINGS, _NOTE = ("L2", "Linf", "L2Linf", "Box", "Subspaces"), "twice-sampling.md"
_PROOFS = (
    Proof(clippings=_CLIPPINGS, noises=("Gaussian",), note=_NOTE),
    Proof(clippings=("L2", "Box", "Subspaces"), noises=("BlockGaussian",), note=_NOTE),
)


class EveryRecord:
    """Mixin for a `Sampling`: every record takes part."""

    @property
    def participation(self) -> float:
        return 1.0

    def draw(self, records: int, generator: RandomSource) -> "torch.Tensor":
        import torch

        return torch.arange(records, device=generator.device)


@dataclass(frozen=True, kw_only=True)
class Poisson(Sampling):
    """Poisson subsampling: each record takes part with probability `rate`, independently.

    Args:
        rate: Sampling probability; also positional.
    """

    rate: float = field(kw_only=False, metadata=RATE)

    @property
    def participation(self) -> float:
        return self.rate

    def draw(self, records: int, generator: RandomSource) -> "torch.Tensor":
        # 62 bits: a single-precision uniform would run a rate up to 2**-24 off the charge
        return bernoulli(records, self.rate, generator).nonzero().squeeze(1)


@dataclass(frozen=True, kw_only=True)
class FullBatch(EveryRecord, Sampling):
    """Every record takes part in every step."""


@dataclass(frozen=True, kw_only=True)
class Coordinate(EveryRecord, Sampling):
    """Every record takes part in each coordinate with probability `rate`, independently.

    Args:
        rate: Sampling probability, rounded to a multiple of 1/256; also positional.
    """

    proofs: ClassVar[tuple[Proof, ...]] = _PROOFS

    rate: float = field(kw_only=False, metadata=_COORDINATE_RATE)

    @property
    def coordinate_participation(self) -> float:
        return self.rate


@dataclass(frozen=True, kw_only=True)
class Twice(Sampling):
    """Twice sampling: Poisson sampling of records, then of the coordinates of each, independently.

    Args:
        rate: Probability that a record takes part.
        coordinate_rate: Probability that a coordinate of it does, rounded to a multiple of 1/256.
    """

    proofs: ClassVar[tuple[Proof, ...]] = _PROOFS

    rate: float = field(metadata=RATE)
    coordinate_rate: float = field(metadata=_COORDINATE_RATE)

    @property
    def participation(self) -> float:
        return self.rate

    @property
    def coordinate_participation(self) -> float:
        return self.coordinate_rate

    def draw(self, records: int, generator: RandomSource) -> "torch.Tensor":
        return Poisson(self.rate).draw(records, generator)
