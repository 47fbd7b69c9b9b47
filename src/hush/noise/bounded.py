"""Gaussian noise with bounded support: rectified, quantized, sign, truncated."""

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Self

from hush.core.parts import Noise, Proof
from hush.core.randomness import RandomSource, uniform
from hush.core.value import count, number
from hush.noise.exact.ziggurat import grid_spacing
from hush.noise.gaussian import Gaussian

if TYPE_CHECKING:
    import torch

SCALE = number(
    at_least=1e-12,
    at_most=1e15,
    why="it is the deviation of the noise on the sum: without noise there is no privacy, and infinite "
    "noise removes all signal",
    example=4.0,
)
BOUND = number(
    at_least=1e-12,
    at_most=1e15,
    why="the support is [-bound, bound], which must not depend on the records",
    example=8.0,
)
PROOFS = (
    Proof(
        samplings=("Poisson", "FullBatch", "Coordinate", "Twice"),
        clippings=("L2", "Linf", "L2Linf"),
        note="bounded.md",
    ),
)
_FAR = 16.0
"""Distance from the support, in deviations, from which the inverse cdf is computed in logarithms."""
_NOTHING = 30.0
"""Distance in deviations beyond which the tail is negligible relative to the tail at _FAR."""
_AT_ONCE = {"cpu": 2**15, "cuda": 2**24}
_ABOVE = (-3.169146076, -9.956167441, 6.791834653, 10.371648548, 1.592575536)
_BELOW = (1.0, 7.195741002, 7.363518976, 1.125664101)
"""The upper exp(-r^2) quantile is about above(r) / below(r), for probabilities of at most 1/2."""


@dataclass(frozen=True, kw_only=True)
class NormalOnSupport:
    """Mixin for noise with bounded support, from a normal draw of standard deviation `scale`.

    The normal law dominates it, and calibration changes `scale` and `bound` in proportion (bounded.md).
    It is not a `Noise`, because plans may name every `Noise` class.
    """

    exact: ClassVar[bool] = True
    scale: float = field(metadata=SCALE)

    def dominating_noise(self, reference_norm: float) -> Gaussian:
        return Gaussian(multiplier=self.scale / reference_norm)

    def with_multiplier(self, multiplier: float) -> Self:
        bound = {"bound": each * (multiplier / self.scale)} if (each := vars(self).get("bound")) else {}
        return replace(self, scale=multiplier, **bound)

    def _normal(self, location: "torch.Tensor", generator: RandomSource) -> "torch.Tensor":
        return Gaussian(multiplier=self.scale).privatize(location, norm=1.0, generator=generator)


@dataclass(frozen=True, kw_only=True)
class Rectified(NormalOnSupport, Noise):
    """Rectified Gaussian noise: the sum plus normal noise, clamped to [-bound, bound].

    Args:
        scale: Absolute standard deviation of the draw (of the sum, not in clipping norms).
        bound: End of the support, absolute.

    **Guarantee.** Post-processing of `Gaussian`: docs/guarantees/bounded.md.
    """

    proofs: ClassVar[tuple[Proof, ...]] = PROOFS

    bound: float = field(metadata=BOUND)

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: RandomSource
    ) -> "torch.Tensor":
        return self._normal(location, generator).clamp_(-self.bound, self.bound)


@dataclass(frozen=True, kw_only=True)
class Quantized(NormalOnSupport, Noise):
    """Quantized Gaussian noise: the sum plus normal noise, rounded to evenly spaced levels in [-bound,
    bound].

    With two levels it is `bound` times `StochasticSign`; with many it approaches `Rectified`.

    Args:
        scale: Absolute standard deviation of the draw (of the sum, not in clipping norms).
        bound: Largest level, absolute.
        levels: Number of levels, at least 2.
    """

    proofs: ClassVar[tuple[Proof, ...]] = PROOFS

    bound: float = field(metadata=BOUND)
    levels: int = field(
        metadata=count(
            "one level has no information, and single precision cannot distinguish more levels",
            at_least=2,
            at_most=2**16,
            example=16,
        )
    )

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: RandomSource
    ) -> "torch.Tensor":
        import torch

        noisy = self._normal(location, generator)
        spacing = 2 * self.bound / (self.levels - 1)
        # in double precision, in which the index of the level is exact
        level = noisy.to(torch.float64).add_(self.bound).div_(spacing).round_()
        level = level.clamp_(0, self.levels - 1).mul_(spacing).sub_(self.bound)
        return noisy.copy_(level)


@dataclass(frozen=True, kw_only=True)
class StochasticSign(NormalOnSupport, Noise):
    """Stochastic sign: the sign (-1 or 1) of the sum plus normal noise.

    Args:
        scale: Absolute standard deviation of the draw (of the sum, not in clipping norms); also
            positional.
    """

    proofs: ClassVar[tuple[Proof, ...]] = PROOFS

    scale: float = field(kw_only=False, metadata=SCALE)

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: RandomSource
    ) -> "torch.Tensor":
        # torch.sign(0) is 0, an outcome that the accounted law does not have
        return self._normal(location, generator).ge_(0).mul_(2).sub_(1)


@dataclass(frozen=True, kw_only=True)
class Truncated(NormalOnSupport, Noise):
    """Truncated Gaussian noise: the sum plus normal noise, conditioned on [-bound, bound].

    Args:
        scale: Absolute standard deviation of the draw (of the sum, not in clipping norms).
        bound: End of the support, absolute.

    **Guarantee.** With full batches, a share `largest_variance(bound / scale)` of the Gaussian's Rényi
    divergence, and never more than the Gaussian's cost: docs/guarantees/bounded.md. Draws use the
    inverse cdf in double precision, because the running time of rejection sampling would depend on the
    records.
    """

    exact: ClassVar[bool] = False
    proofs: ClassVar[tuple[Proof, ...]] = PROOFS

    bound: float = field(metadata=BOUND)

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: RandomSource
    ) -> "torch.Tensor":
        if not location.numel():
            return location
        width, step = 2 * self.bound / self.scale, grid_spacing(self.scale) * 2.0**-16
        for part in location.view(-1).split(_AT_ONCE[location.device.type]):
            share = uniform(len(part), generator).to(part.device)
            depth = quantile(part.double().abs().sub_(self.bound).div_(self.scale), width, share)
            drawn = depth.mul_(-self.scale).add_(self.bound)
            # rounded to a grid: the lowest bits of a double would reveal the location
            drawn = drawn.div_(step).round_().mul_(step).clamp_(-self.bound, self.bound)
            part.copy_(drawn.where(part >= 0, -drawn))
        return location


def largest_variance(bound: float) -> float:
    """Variance of a standard normal variable conditioned on [-bound, bound], rounded up.

    The largest of all locations, and at most that of the uniform law: docs/guarantees/bounded.md.
    """
    density = math.sqrt(2 / math.pi) * math.exp(-(bound**2) / 2)
    closed_form = 1 - bound * density / math.erf(bound / math.sqrt(2)) + 1e-14
    return min(1.0, closed_form, bound**2 / 3 * (1 + 1e-14))


def quantile(outside: "torch.Tensor", width: float, share: "torch.Tensor") -> "torch.Tensor":
    """Quantiles of the truncated law: distance from the nearer end of the support, in deviations.

    `outside` is the distance of the location from that end (negative inside the support), and `share` is
    the probability of a smaller distance.
    """
    depth = _near(outside.clamp(max=_FAR), width, share)
    far = _far(outside.clamp(min=_FAR), width, share)
    return far.where(outside > _FAR, depth).clamp_(0.0, width)


def _near(outside: "torch.Tensor", width: float, share: "torch.Tensor") -> "torch.Tensor":
    """`quantile` in and near the support, from the inverse of the normal tail.

    A rational function with error 5e-5 and a step of Halley's method, which cubes the error. The running
    time of torch.special.ndtri would depend on its argument.
    """
    import torch

    # erfc, not torch.special.ndtr, which is 1 + erf and loses the tail
    beyond = _tail(outside).mul_(1 - share).add_(_tail((outside + width).clamp_(max=_NOTHING)) * share)
    # the smaller of the tail and its complement, which is a multiple of 2**-53 or rounded to 0
    smaller = torch.minimum(beyond, (1 - beyond).clamp_(min=2.0**-54))
    root = smaller.log().neg_().sqrt_()
    place = _polynomial(_ABOVE, root).div_(_polynomial(_BELOW, root))
    density = place.square().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    step = _tail(place).sub_(smaller).div_(density)
    place.add_(step.div_(1 - place * step / 2))
    return torch.copysign(place, beyond.neg_().add_(0.5)).sub_(outside)


def _far(outside: "torch.Tensor", width: float, share: "torch.Tensor") -> "torch.Tensor":
    """`quantile` far outside: one step of Newton's method on the log of the tail.

    With m outside and depth t, minus the log of tail(m + t) / tail(m) is
    m t + t^2 / 2 + log(hazard(m + t) / hazard(m)), convex in t, with slope hazard(m) at 0 and second
    derivative 1 - O(1/m^2): the parabola's depth has relative error 1/m^4, and a step squares it.
    """
    hazard = outside / _series(outside)
    whole = _lost(outside, outside.new_tensor(width), hazard)
    target = whole.neg_().expm1_().mul_(share).log1p_().neg_()
    depth = 2 * target / (hazard.square().add_(2 * target).sqrt_().add_(hazard))
    end = outside + depth
    return depth - (_lost(outside, depth, hazard) - target) * _series(end) / end


def _lost(outside: "torch.Tensor", depth: "torch.Tensor", hazard: "torch.Tensor") -> "torch.Tensor":
    """Negative log of tail(outside + depth) / tail(outside)."""
    end = outside + depth
    return end.div(_series(end)).div_(hazard).log_().add_((outside + depth / 2).mul_(depth))


def _series(x: "torch.Tensor") -> "torch.Tensor":
    """x tail(x) / density(x) (Abramowitz and Stegun 26.2.12); the first omitted term is 945 x^-10."""
    w = x.square().reciprocal_()
    series = w.mul(-7).add_(1).mul_(w).mul_(-5).add_(1).mul_(w).mul_(-3).add_(1).mul_(w)
    return series.neg_().add_(1)


def _tail(x: "torch.Tensor") -> "torch.Tensor":
    return x.mul(math.sqrt(0.5)).erfc_().mul_(0.5)


def _polynomial(coefficients: tuple[float, ...], x: "torch.Tensor") -> "torch.Tensor":
    """The sum of coefficients[k] x^k."""
    total = x.mul(coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        total.add_(coefficient).mul_(x)
    return total.add_(coefficients[0])
