"""Functions of a normal draw with values in a fixed support: rectified, quantized, sign."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from hush.core.errors import InvalidValue
from hush.core.parts import Noise, Proof
from hush.core.randomness import Randomness
from hush.core.value import check_count, number
from hush.noise.gaussian import Gaussian

if TYPE_CHECKING:
    import torch

SCALE = number(
    at_least=1e-12,
    at_most=1e15,
    why="it is the deviation of the noise on the sum: without noise nothing is private, and noise "
    "beyond any number leaves nothing to train",
    example=4.0,
)
BOUND = number(
    at_least=1e-12,
    at_most=1e15,
    why="the support is [-bound, bound], chosen without looking at the records, and must hold something",
    example=8.0,
)
PROOFS = (
    Proof(
        samplings=("Poisson", "FullBatch", "Coordinate", "Twice"),
        clippings=("L2", "Linf", "L2Linf"),
        note="bounded.md",
    ),
)
"""Of normal laws on a fixed support: the whole normal law dominates them."""


@dataclass(frozen=True, kw_only=True)
class NormalOnSupport:
    """A law on a fixed support made from a normal draw around the sum, of absolute deviation `scale`.

    The normal law itself dominates it, and calibration rescales it by its deviation: bounded.md. Mixed
    in rather than derived from `Noise`, where every class is a noise that a plan may name.
    """

    scale: float = field(metadata=SCALE)

    def dominating_noise(self, reference_norm: float) -> Gaussian:
        return Gaussian(multiplier=self.scale / reference_norm)

    def with_multiplier(self, multiplier: float) -> Self:
        return replace(self, scale=multiplier)

    def _normal(self, location: "torch.Tensor", generator: Randomness) -> "torch.Tensor":
        return Gaussian(multiplier=self.scale).privatize(location, norm=1.0, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Rectified(NormalOnSupport, Noise):
    """A normal draw around the sum, of standard deviation `scale`, clamped to [-bound, bound].

    Args:
        scale: Standard deviation of the draw, absolute: of the sum, not in clipping norms.
        bound: End of the support, absolute.

    **Guarantee.** Post-processing of `Gaussian`: docs/guarantees/bounded.md.
    """

    exact: ClassVar[bool] = True
    proofs: ClassVar[tuple[Proof, ...]] = PROOFS

    bound: float = field(metadata=BOUND)

    @classmethod
    def examples(cls, deviation: float, *, blocks: int, reference_norm: float) -> tuple[Noise, ...]:
        return (cls(scale=deviation, bound=2.0),)

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: Randomness
    ) -> "torch.Tensor":
        return self._normal(location, generator).clamp_(-self.bound, self.bound)


_MAX_LEVELS = 2**16


@dataclass(frozen=True, kw_only=True)
class Quantized(NormalOnSupport, Noise):
    """A normal draw around the sum, of standard deviation `scale`, rounded to the nearest of `levels`
    evenly spaced numbers from -bound to bound.

    With two levels it is `bound` times `StochasticSign`; with more and more it tends to `Rectified`.

    Args:
        scale: Standard deviation of the draw, absolute: of the sum, not in clipping norms.
        bound: Largest level, absolute.
        levels: Number of levels, at least 2.
    """

    exact: ClassVar[bool] = True
    proofs: ClassVar[tuple[Proof, ...]] = PROOFS

    bound: float = field(metadata=BOUND)
    levels: int

    @classmethod
    def examples(cls, deviation: float, *, blocks: int, reference_norm: float) -> tuple[Noise, ...]:
        return (cls(scale=deviation, bound=2.0, levels=5),)

    def __post_init__(self) -> None:
        super().__post_init__()
        why = "with one level nothing is said"
        object.__setattr__(self, "levels", check_count("levels", self.levels, why, at_least=2))
        if self.levels > _MAX_LEVELS:
            raise InvalidValue(
                f"levels={self.levels} must be <= {_MAX_LEVELS}: single precision does not tell more of "
                f"them apart, so the draw would not be the one that is charged. Use Rectified.",
                key="levels",
            )

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: Randomness
    ) -> "torch.Tensor":
        import torch

        noisy = self._normal(location, generator)
        spacing = 2 * self.bound / (self.levels - 1)
        # in double precision, for the level's number is exact in no smaller type
        level = noisy.to(torch.float64).add_(self.bound).div_(spacing).round_()
        level = level.clamp_(0, self.levels - 1).mul_(spacing).sub_(self.bound)
        return noisy.copy_(level)


@dataclass(frozen=True, kw_only=True)
class StochasticSign(NormalOnSupport, Noise):
    """-1 or 1: the sign of a normal draw around the sum.

    Args:
        scale: Standard deviation of the draw, absolute: of the sum, not in clipping norms.
    """

    exact: ClassVar[bool] = True
    proofs: ClassVar[tuple[Proof, ...]] = PROOFS

    @classmethod
    def examples(cls, deviation: float, *, blocks: int, reference_norm: float) -> tuple[Noise, ...]:
        return (cls(scale=deviation),)

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: Randomness
    ) -> "torch.Tensor":
        # torch.sign(0) is 0, a third outcome that has no probability in the law that is charged
        return self._normal(location, generator).ge_(0).mul_(2).sub_(1)
