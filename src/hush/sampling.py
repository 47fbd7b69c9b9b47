"""Subsampling of records and coordinates."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hush.core.errors import InvalidValue
from hush.core.parts import Proof, Sampling
from hush.core.randomness import RandomSource, bernoulli, random_bits
from hush.core.value import count, number

if TYPE_CHECKING:
    import torch

__all__ = ["Coordinate", "FixedSize", "FullBatch", "Poisson", "TruncatedPoisson", "Twice"]

_WHY = "it is the probability that a record takes part, and amplification by sampling is proved for it"
RATE = number(at_least=1e-9, at_most=1, why=_WHY, example=0.01)
_WHY_BYTE = "it is the probability that a coordinate of a record takes part, drawn with one random byte"
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
        # 62 bits: with single-precision uniforms the actual rate would differ by up to 2**-24
        return bernoulli(records, self.rate, generator).nonzero().squeeze(1)


_LIMITED = (
    Proof(
        clippings=("L2", "Normalized", "Quantile", "L2Linf", "Box", "Subspaces"),
        noises=("Gaussian",),
        note="limited-batches.md",
    ),
)
_SLOTS = count("the law of a batch depends on the number of slots", example=60_000)


class Competing:
    """Mixin for a `Sampling` of a public number of slots, which compete for places in a batch."""

    records: int
    counts_slots: ClassVar[bool] = True

    def check_slots(self, slots: int) -> None:
        if slots != self.records:
            raise InvalidValue(
                f"{type(self).__name__} has records={self.records} and the data {slots} slots: the "
                f"charge depends on their number. Pass records={slots} to the sampling.",
                key="records",
            )


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(Competing, Sampling):
    """Poisson subsampling with a largest batch: a larger draw is cut to it, at random.

    No batch exceeds `max_batch`, so memory and shapes are public. The charge includes the truncation.
    With `max_batch` six standard deviations above the mean it costs what `Poisson` costs. Reference:
    Chua et al., Scalable DP-SGD: Shuffling vs. Poisson Subsampling, NeurIPS 2024.

    Args:
        rate: Probability that a record is drawn.
        max_batch: Largest number of records in a batch.
        records: Number of slots of the data, which is public.
    """

    proofs: ClassVar[tuple[Proof, ...]] = _LIMITED

    rate: float = field(metadata=RATE)
    max_batch: int = field(metadata=count("it is the largest number of records in a batch", example=300))
    records: int = field(metadata=_SLOTS)

    @property
    def participation(self) -> float:
        # in a draw with a free place, or as one of the `max_batch` records that are kept
        free = 1 - binomial_tail(self.max_batch - 1, self.records - 1, self.rate)
        kept = binomial_tail(self.max_batch, self.records, self.rate) * self.max_batch / self.records
        return self.rate * free + kept

    def draw(self, records: int, generator: RandomSource) -> "torch.Tensor":
        self.check_slots(records)
        drawn = Poisson(self.rate).draw(records, generator)
        # words for all slots: the use of the stream does not depend on the draw
        order = random_bits(records, generator).to(drawn.device)[drawn].argsort()
        return drawn[order[: self.max_batch].sort().values]


@dataclass(frozen=True, kw_only=True)
class FixedSize(Competing, Sampling):
    """Batches of exactly `size` records, drawn without replacement, independently in each step.

    A record in a batch takes the place of another one. At equal noise a step costs more than a
    Poisson-sampled one, and less than a Poisson-sampled one with half the noise, which is the cost of a
    replaced record. `TruncatedPoisson` also has public shapes, at the price of `Poisson`. Reference:
    Wang, Balle and Kasiviswanathan, Subsampled Renyi Differential Privacy and Analytical Moments
    Accountant, AISTATS 2019.

    Args:
        size: Number of records in a batch.
        records: Number of slots of the data, which is public.
    """

    proofs: ClassVar[tuple[Proof, ...]] = _LIMITED

    size: int = field(metadata=count("it is the number of records in a batch", example=256))
    records: int = field(metadata=_SLOTS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size > self.records:
            raise InvalidValue(
                f"size={self.size} is more than records={self.records}, and no record is drawn twice. "
                "Pass a smaller size, or hush.FullBatch() for all records.",
                key="size",
            )

    @property
    def participation(self) -> float:
        return self.size / self.records

    def draw(self, records: int, generator: RandomSource) -> "torch.Tensor":
        self.check_slots(records)
        return random_bits(records, generator).argsort()[: self.size].sort().values


def binomial_tail(limit: int, count: int, rate: float) -> float:
    """Probability that more than `limit` of `count` independent coins of this rate come up."""
    from scipy.special import betainc

    return float(betainc(limit + 1, count - limit, rate)) if limit < count else 0.0


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
        coordinate_rate: Probability that a coordinate of a sampled record takes part, rounded to a
            multiple of 1/256.
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
