"""Additive noise: Gaussian, Laplace, generalized Gaussian, and Gaussian with a scale per block."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from hush.core.errors import InvalidValue, Unsupported, short_repr
from hush.core.parts import Noise, Proof, SensitivitySet
from hush.core.randomness import RandomSource
from hush.core.value import each, number
from hush.noise.exact import ziggurat

if TYPE_CHECKING:
    import torch

MULTIPLIER = number(
    at_least=1e-12,
    at_most=1e15,
    why="without noise the update is a function of the records and not private, and infinite noise "
    "removes all signal",
    example=1.0,
)


class ExponentialPower(ABC):
    """Mixin for a `Noise` with density proportional to exp(-(|x| / scale)^beta), sampled exactly."""

    additive: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    @abstractmethod
    def exponential_power(self, norm: float) -> tuple[float, float]: ...

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: RandomSource
    ) -> "torch.Tensor":
        return ziggurat.add_noise(location, *self.exponential_power(norm), generator)


@dataclass(frozen=True, kw_only=True)
class Gaussian(ExponentialPower, Noise):
    """Independent normal noise of standard deviation `multiplier` times the clipping norm.

    Args:
        multiplier: Noise multiplier; also positional.
    """

    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=("Poisson", "FullBatch"),
            clippings=("L2", "Lp", "Normalized", "Quantile"),
            note="poisson-gaussian.md",
        ),
        Proof(
            samplings=("Poisson", "FullBatch"),
            clippings=("Linf", "L2Linf", "Box", "Subspaces"),
            note="twice-sampling.md",
        ),
    )

    multiplier: float = field(kw_only=False, metadata=MULTIPLIER)

    def exponential_power(self, norm: float) -> tuple[float, float]:
        return 2.0, self.multiplier * norm * math.sqrt(2)


@dataclass(frozen=True, kw_only=True)
class BlockGaussian(Noise):
    """Independent normal noise per block, with standard deviation `multipliers[j]` times the l2 radius.

    The clipping defines the blocks; the radius of a block is its l2 sensitivity.

    Args:
        multipliers: Noise multiplier of each block; also positional.
    """

    additive: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    # Linf and L2Linf are excluded: their l2 radius, and therefore the noise scale, depends on the number
    # of parameters, but the accounting does not.
    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(
            samplings=("Poisson", "FullBatch"),
            clippings=("L2", "Box", "Subspaces"),
            note="twice-sampling.md",
        ),
    )

    multipliers: Sequence[float] = field(kw_only=False, metadata=each(MULTIPLIER))

    @property
    def multiplier(self) -> float:
        """Multiplier of isotropic noise with the same privacy cost: one record may reach the norm bound
        of every block."""
        return 1 / math.hypot(*(1 / multiplier for multiplier in self.multipliers))

    def with_multiplier(self, multiplier: float) -> Self:
        factor = multiplier / self.multiplier
        return replace(self, multipliers=tuple(factor * value for value in self.multipliers))

    def per_block(
        self, sensitivity: Sequence[SensitivitySet], reference_norm: float
    ) -> list[tuple[Noise, float]]:
        if len(sensitivity) != len(self.multipliers):
            raise InvalidValue(
                f"multipliers={short_repr(self.multipliers)} must have {len(sensitivity)} numbers, one "
                "for each block of the clipping: a block without noise is not private.",
                key="multipliers",
            )
        return [
            (Gaussian(multiplier=multiplier), block.l2_radius)
            for multiplier, block in zip(self.multipliers, sensitivity, strict=True)
        ]

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: RandomSource
    ) -> "torch.Tensor":
        raise Unsupported(
            "BlockGaussian needs the blocks of a clipping rule, and a single draw has no blocks. Use "
            "Gaussian for each block."
        )


@dataclass(frozen=True, kw_only=True)
class GeneralizedGaussian(ExponentialPower, Noise):
    """Independent noise of density proportional to exp(-(|x| / s)^beta), s = `multiplier` * norm.

    It equals `Gaussian(multiplier / sqrt(2))` for beta 2, and `Laplace(multiplier)` for beta 1.

    Args:
        beta: Shape of the density, at least 1.
        multiplier: Scale s, in units of the clipping norm.
    """

    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(samplings=("Poisson", "FullBatch"), clippings=("L2", "Lp"), note="coordinate-wise.md"),
    )

    beta: float = field(
        metadata=number(
            at_least=1,
            at_most=1e4,
            why="below 1 the density is not log-concave and no bound is proved; above the limit the "
            "sampler is not tested",
            example=1.5,
        )
    )
    multiplier: float = field(metadata=MULTIPLIER)

    @classmethod
    def from_sigma(cls, *, beta: float, sigma: float) -> Self:
        """Noise of density proportional to exp(-|x|^beta / sigma) for a clipping norm of 1.

        In this parameterization sigma = s^beta, which is twice the variance for beta 2 (Dytso et al.
        2018).

        Args:
            beta: Shape of the density, at least 1.
            sigma: Divisor of |x|^beta.

        Returns:
            The noise with `multiplier = sigma ** (1 / beta)`.

        >>> GeneralizedGaussian.from_sigma(beta=4.0, sigma=16.0)
        GeneralizedGaussian(beta=4.0, multiplier=2.0)
        """
        law = cls(beta=beta, multiplier=1.0)
        sigma = MULTIPLIER["range"].check("sigma", sigma)
        return replace(law, multiplier=sigma ** (1 / law.beta))

    def exponential_power(self, norm: float) -> tuple[float, float]:
        return self.beta, self.multiplier * norm


@dataclass(frozen=True, kw_only=True)
class Laplace(ExponentialPower, Noise):
    """Independent noise of density proportional to exp(-|x| / s), s = `multiplier` times the norm.

    Args:
        multiplier: Scale s, in units of the clipping norm; also positional.
    """

    proofs: ClassVar[tuple[Proof, ...]] = (
        Proof(samplings=("Poisson", "FullBatch"), clippings=("L2", "Lp"), note="scalar-noise.md"),
    )

    multiplier: float = field(kw_only=False, metadata=MULTIPLIER)

    def exponential_power(self, norm: float) -> tuple[float, float]:
        return 1.0, self.multiplier * norm
