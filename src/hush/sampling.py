"""Subsampling of records and coordinates."""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hush.core.errors import InvalidValue
from hush.core.parts import Proof, Sampling
from hush.core.randomness import RandomSource, Stream, bernoulli, derive_source, random_bits
from hush.core.value import count, number

if TYPE_CHECKING:
    import torch

__all__ = [
    "Coordinate",
    "CyclicPoisson",
    "FixedSize",
    "FullBatch",
    "Poisson",
    "RandomAllocation",
    "TruncatedPoisson",
    "Twice",
]

_WHY = "it is the sampling probability of a record, which privacy amplification depends on"
RATE = number(at_least=1e-9, at_most=1, why=_WHY, example=0.01)
_WHY_BYTE = "it is the sampling probability of a coordinate of a record, drawn with one random byte"
_BYTES = number(at_least=1 / 512, at_most=1, why=_WHY_BYTE, example=0.5)["check"]
# round to a positive multiple of 1/256, which one random byte implements exactly
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

    def draw(self, records: int, generator: RandomSource, step: int = 0) -> "torch.Tensor":
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

    def draw(self, records: int, generator: RandomSource, step: int = 0) -> "torch.Tensor":
        # with single-precision uniforms, the actual rate would differ by up to 2**-24
        return bernoulli(records, self.rate, generator).nonzero().squeeze(1)


@dataclass(frozen=True, kw_only=True)
class CyclicPoisson(Sampling):
    """Poisson subsampling of one group of records after another.

    Slot i is in group i mod `cycle`. Step t (from 0) samples each record of group t mod `cycle` with
    probability `rate`. A record can take part once in `cycle` consecutive steps, so they are charged as
    one Poisson-sampled step at `rate`. `Banded` noise needs this sampling. Reference: Choquette-Choo et
    al., (Amplified) Banded Matrix Factorization, NeurIPS 2023.

    Args:
        rate: Sampling probability within the group of a step.
        cycle: Number of groups.
    """

    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            clippings=("L2", "Normalized", "L2Linf", "Box"),
            noises=("Gaussian", "Banded"),
            note="correlated-noise.md",
        ),
    )
    counts_slots: ClassVar[bool] = True

    rate: float = field(metadata=RATE)
    cycle: int = field(metadata=count("it is the number of groups of records", example=8))

    @property
    def period(self) -> int:
        return self.cycle

    @property
    def participation(self) -> float:
        return self.rate

    def candidates(self, records: int, step: int) -> range:
        return range(step % self.cycle, records, self.cycle)

    def draw(self, records: int, generator: RandomSource, step: int = 0) -> "torch.Tensor":
        group = self.candidates(records, step)
        drawn = bernoulli(len(group), self.rate, generator).nonzero().squeeze(1)
        return drawn.mul_(group.step).add_(group.start)


MAX_ALLOCATED = 10**6
"""Largest number of steps of an epoch of `RandomAllocation`."""

_LIMITED = (
    Proof(
        clippings=("L2", "Normalized", "Quantile", "L2Linf", "Box", "Subspaces"),
        noises=("Gaussian",),
        note="limited-batches.md",
    ),
)
_SLOTS = count("the distribution of batches depends on the number of slots", example=60_000)


class Competing:
    """Mixin for a `Sampling` with limited batches, in which a public number of slots compete."""

    records: int
    counts_slots: ClassVar[bool] = True

    def check_slots(self, slots: int) -> None:
        if slots != self.records:
            raise InvalidValue(
                f"{type(self).__name__} has records={self.records}, but the data has {slots} slots: the "
                f"privacy cost depends on their number. Pass records={slots} to the sampling.",
                key="records",
            )


@dataclass(frozen=True, kw_only=True)
class TruncatedPoisson(Competing, Sampling):
    """Poisson subsampling with a maximum batch size: a larger batch is randomly truncated.

    No batch exceeds `max_batch`, so memory use and shapes are public. The privacy cost includes the
    truncation. It equals that of `Poisson` if `max_batch` is six standard deviations above the mean.
    Reference:
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
        # either the batch is not full without the record, or the record survives the truncation
        free = 1 - binomial_tail(self.max_batch - 1, self.records - 1, self.rate)
        kept = binomial_tail(self.max_batch, self.records, self.rate) * self.max_batch / self.records
        return self.rate * free + kept

    def draw(self, records: int, generator: RandomSource, step: int = 0) -> "torch.Tensor":
        self.check_slots(records)
        drawn = Poisson(self.rate).draw(records, generator)
        # draw words for all slots, so the position in the stream does not depend on the batch
        order = random_bits(records, generator).to(drawn.device)[drawn].argsort()
        return drawn[order[: self.max_batch].sort().values]


@dataclass(frozen=True, kw_only=True)
class FixedSize(Competing, Sampling):
    """Batches of exactly `size` records, drawn without replacement, independently in each step.

    A record in a batch displaces another record. At equal noise a step costs more than a Poisson-sampled
    step, and less than a Poisson-sampled step with half the noise, which is the cost of a replaced
    record. `TruncatedPoisson` also has public shapes, at the privacy cost of `Poisson`. Reference: Wang,
    Balle and Kasiviswanathan, Subsampled Renyi Differential Privacy and Analytical Moments Accountant,
    AISTATS 2019.

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
                f"size={self.size} is more than records={self.records}, but no record is drawn twice. "
                "Pass a smaller size, or hush.FullBatch() for all records.",
                key="size",
            )

    @property
    def participation(self) -> float:
        return self.size / self.records

    def draw(self, records: int, generator: RandomSource, step: int = 0) -> "torch.Tensor":
        self.check_slots(records)
        return random_bits(records, generator).argsort()[: self.size].sort().values


@dataclass(frozen=True, kw_only=True)
class RandomAllocation(Sampling):
    """Every record takes part once per epoch, in a step drawn uniformly ("balls and bins").

    The steps of the records are independent, so the sizes of batches are random. An epoch is charged as
    a whole: a run that stops within an epoch costs the whole epoch. In most settings an epoch costs less
    than as many steps of `Poisson` with the same expected batch. Reference: Feldman and Shenfeld,
    Privacy amplification by random allocation, NeurIPS 2025.

    Args:
        steps: Number of steps of an epoch.
        times: Number of steps per epoch in which a record takes part: one in each of `times` parts of
            `steps` / `times` consecutive steps. It divides `steps`.
    """

    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            clippings=("L2", "Normalized", "Quantile", "L2Linf", "Box", "Subspaces"),
            noises=("Gaussian",),
            note="random-allocation.md",
        ),
    )

    steps: int = field(metadata=count("it is the number of steps of an epoch", example=100))
    times: int = field(default=1, metadata=count("it is the number of steps with a record", example=1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.steps % self.times or self.steps > MAX_ALLOCATED:
            raise InvalidValue(
                f"steps={self.steps}, times={self.times}: an epoch has `times` parts of equal length, "
                f"with at most {MAX_ALLOCATED} steps in all, because a part is charged as a whole. Pass "
                "e.g. steps=100 and times=1.",
                key="steps",
            )

    @property
    def period(self) -> int:
        return self.steps // self.times

    @property
    def participation(self) -> float:
        return 1.0

    @property
    def step_participation(self) -> float:
        return 1 / self.period

    def draw(self, records: int, generator: RandomSource, step: int = 0) -> "torch.Tensor":
        # a function of the key, the slot and the part: a resumed run continues the same allocation
        key = generator if isinstance(generator, Stream) else _seeded_stream(generator)
        source = derive_source(key, b"allocation of part %d" % (step // self.period))
        words = random_bits(records, source) >> 1 & 2**62 - 1
        return (words % self.period == step % self.period).nonzero().squeeze(1)


def _seeded_stream(generator: "torch.Generator") -> Stream:
    """A stream under a key that depends on the generator's seed alone, not on its state."""
    return Stream(generator.device, hashlib.sha256(b"%d" % generator.initial_seed()).digest())


def binomial_tail(limit: int, count: int, rate: float) -> float:
    """Probability that a binomial variable with parameters `count` and `rate` exceeds `limit`."""
    from scipy.special import betainc

    return float(betainc(limit + 1, count - limit, rate)) if limit < count else 0.0


@dataclass(frozen=True, kw_only=True)
class FullBatch(EveryRecord, Sampling):
    """No subsampling: every record takes part in every step."""


@dataclass(frozen=True, kw_only=True)
class Coordinate(EveryRecord, Sampling):
    """Coordinate sampling: each coordinate of each record takes part with probability `rate`.

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
    """Twice sampling: Poisson sampling of records, then independent sampling of their coordinates.

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

    def draw(self, records: int, generator: RandomSource, step: int = 0) -> "torch.Tensor":
        return Poisson(self.rate).draw(records, generator)
