"""Generalized Gaussian noise: Laplace at beta 1, normal at beta 2, flatter-topped beyond."""

from dataclasses import dataclass, field
from typing import ClassVar

from hush.core.parts import Noise, Proof
from hush.core.ranges import number
from hush.noise.gaussian import MULTIPLIER, ExponentialPower


@dataclass(frozen=True, kw_only=True)
class GeneralizedGaussian(ExponentialPower, Noise):
    """Independent noise of density proportional to exp(-(|x| / s)^beta), s = `multiplier` * norm.

    At beta 2 it is `Gaussian` with `multiplier / sqrt(2)`; at beta 1 it is `Laplace`.

    Args:
        beta: Shape of the density, at least 1.
        multiplier: Scale s, in units of the clipping norm.
    """

    additive: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(samplings=("Poisson", "FullBatch"), clippings=("L2", "Lp"), note="coordinate-wise.md"),
    )

    beta: float = field(
        metadata=number(
            at_least=1,
            at_most=1e4,
            why="below 1 the density is not log-concave and no divergence bound here is proved; beyond "
            "these limits the draws are not tested",
            example=1.5,
        )
    )
    multiplier: float = field(metadata=MULTIPLIER)

    def exponential_power(self, norm: float) -> tuple[float, float]:
        return self.beta, self.multiplier * norm

    @classmethod
    def examples(cls, deviation: float, *, blocks: int, reference_norm: float) -> tuple[Noise, ...]:
        return cls(beta=1.5, multiplier=1.0), cls(beta=3.0, multiplier=2.5)


@dataclass(frozen=True, kw_only=True)
class Laplace(ExponentialPower, Noise):
    """Independent noise of density proportional to exp(-|x| / s), s = `multiplier` times the norm.

    Args:
        multiplier: Scale s, in units of the clipping norm.
    """

    additive: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(samplings=("Poisson", "FullBatch"), clippings=("L2", "Lp"), note="scalar-noise.md"),
    )

    multiplier: float = field(metadata=MULTIPLIER)

    def exponential_power(self, norm: float) -> tuple[float, float]:
        return 1.0, self.multiplier * norm

    @classmethod
    def examples(cls, deviation: float, *, blocks: int, reference_norm: float) -> tuple[Noise, ...]:
        return (cls(multiplier=1.0),)
