"""Poisson subsampling, and full batches."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hush.core.parts import Sampling
from hush.core.randomness import RandomSource, bernoulli
from hush.core.value import number

if TYPE_CHECKING:
    import torch

RATE = number(
    at_least=1e-9,
    at_most=1,
    why="it is the probability that a record takes part, and amplification by sampling is proved for "
    "exactly that probability, which a double-precision draw meets",
    example=0.01,
)


@dataclass(frozen=True, kw_only=True)
class Poisson(Sampling):
    """Poisson subsampling: each record takes part with probability `rate`, independently.

    Args:
        rate: Sampling probability.
    """

    rate: float = field(metadata=RATE)

    @property
    def participation(self) -> float:
        return self.rate

    def draw(self, records: int, generator: RandomSource) -> "torch.Tensor":
        # 62 bits: a single-precision uniform would run a rate up to 2**-24 off the charge.
        return bernoulli(records, self.rate, generator).nonzero().squeeze(1)


@dataclass(frozen=True, kw_only=True)
class FullBatch(Sampling):
    """Every record takes part in every step."""

    @property
    def participation(self) -> float:
        return 1.0

    def draw(self, records: int, generator: RandomSource) -> "torch.Tensor":
        import torch

        return torch.arange(records, device=generator.device)
