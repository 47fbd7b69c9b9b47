"""Gaussian noise with bounded support: rectified, quantized, stochastic sign and truncated."""

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
    why="it is the standard deviation of the noise on the sum: a sum without noise is not private, and "
    "infinite noise removes all signal",
    example=4.0,
)
BOUND = number(
    at_least=1e-12,
    at_most=1e15,
    why="the noise has support [-bound, bound], which must not depend on the records",
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
"""Distance from the support, in standard deviations, above which the inverse cdf is computed in logs."""
_NOTHING = 30.0
"""Distance in standard deviations beyond which the tail is negligible relative to the tail at _FAR."""
_AT_ONCE = {"cpu": 2**15, "cuda": 2**24}
_ABOVE = (-3.169146076, -9.956167441, 6.791834653, 10.371648548, 1.592575536)
_BELOW = (1.0, 7.195741002, 7.363518976, 1.125664101)
"""Coefficients of the approximation above(r) / below(r) of the normal quantile with upper tail
probability exp(-r^2) <= 1/2."""


@dataclass(frozen=True, kw_only=True)
class NormalOnSupport:
    """Mixin for noise with bounded support, based on a normal draw of standard deviation `scale`.

    The normal distribution dominates it, and calibration changes `scale` and `bound` in proportion
    (docs/guarantees/bounded.md). It does not inherit from `Noise`, because a plan may use every subclass
    of `Noise`.
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
        scale: Standard deviation of the noise on the sum, in absolute units (not in clipping norms).
        bound: End of the support, in absolute units.

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
        scale: Standard deviation of the noise on the sum, in absolute units (not in clipping norms).
        bound: Largest level, in absolute units.
        levels: Number of levels, at least 2.
    """

    proofs: ClassVar[tuple[Proof, ...]] = PROOFS

    bound: float = field(metadata=BOUND)
    levels: int = field(
        metadata=count(
            "one level carries no information, and single precision cannot distinguish more levels",
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
        # in double precision, so the index of the level is exact
        level = noisy.to(torch.float64).add_(self.bound).div_(spacing).round_()
        level = level.clamp_(0, self.levels - 1).mul_(spacing).sub_(self.bound)
        return noisy.copy_(level)


@dataclass(frozen=True, kw_only=True)
class StochasticSign(NormalOnSupport, Noise):
    """Stochastic sign: the sign (-1 or 1) of the sum plus normal noise.

    Args:
        scale: Standard deviation of the noise on the sum, in absolute units (not in clipping norms);
            also positional.
    """

    proofs: ClassVar[tuple[Proof, ...]] = PROOFS

    scale: float = field(kw_only=False, metadata=SCALE)

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: RandomSource
    ) -> "torch.Tensor":
        # torch.sign(0) is 0, which is not an outcome of the accounted distribution
        return self._normal(location, generator).ge_(0).mul_(2).sub_(1)


@dataclass(frozen=True, kw_only=True)
class Truncated(NormalOnSupport, Noise):
    """Truncated Gaussian noise: the sum plus normal noise, conditioned on [-bound, bound].

    Args:
        scale: Standard deviation of the noise on the sum, in absolute units (not in clipping norms).
        bound: End of the support, in absolute units.

    **Guarantee.** At most the privacy cost of the Gaussian. With full batches, the Rényi divergence is
    `largest_variance(bound / scale)` times that of the Gaussian: docs/guarantees/bounded.md. Sampling
    uses the inverse cdf in double precision, because the running time of rejection sampling would depend
    on the records.
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
            # rounded to a grid: the lowest bits of a double would reveal the input
            drawn = drawn.div_(step).round_().mul_(step).clamp_(-self.bound, self.bound)
            part.copy_(drawn.where(part >= 0, -drawn))
        return location


def largest_variance(bound: float) -> float:
    """Variance of a standard normal variable conditioned on [-bound, bound], rounded up.

    Location 0 has the largest variance. It is at most bound**2 / 3, the variance of the uniform
    distribution: docs/guarantees/bounded.md.
    """
    density = math.sqrt(2 / math.pi) * math.exp(-(bound**2) / 2)
    closed_form = 1 - bound * density / math.erf(bound / math.sqrt(2)) + 1e-14
    return min(1.0, closed_form, bound**2 / 3 * (1 + 1e-14))


def quantile(outside: "torch.Tensor", width: float, share: "torch.Tensor") -> "torch.Tensor":
    """Quantiles of the truncated distribution, as distances from the nearer end of the support.

    All distances are in standard deviations. `outside` is the distance of the input from that end
    (negative inside the support), and `share` is the probability of a smaller distance.
    """
    depth = _near(outside.clamp(max=_FAR), width, share)
    far = _far(outside.clamp(min=_FAR), width, share)
    return far.where(outside > _FAR, depth).clamp_(0.0, width)


def _near(outside: "torch.Tensor", width: float, share: "torch.Tensor") -> "torch.Tensor":
    """`quantile` inside and near the support, from the inverse of the normal tail.

    Uses a rational approximation with error 5e-5 and one step of Halley's method, which cubes the error.
    The running time of torch.special.ndtri would depend on its argument.
    """
    import torch

    # not torch.special.ndtr, which computes 1 + erf and is inaccurate in the tail
    beyond = _tail(outside).mul_(1 - share).add_(_tail((outside + width).clamp_(max=_NOTHING)) * share)
    # the complement is a multiple of 2**-53 and may be rounded to 0
    smaller = torch.minimum(beyond, (1 - beyond).clamp_(min=2.0**-54))
    root = smaller.log().neg_().sqrt_()
    place = _polynomial(_ABOVE, root).div_(_polynomial(_BELOW, root))
    density = place.square().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    step = _tail(place).sub_(smaller).div_(density)
    place.add_(step.div_(1 - place * step / 2))
    return torch.copysign(place, beyond.neg_().add_(0.5)).sub_(outside)


def _far(outside: "torch.Tensor", width: float, share: "torch.Tensor") -> "torch.Tensor":
    """`quantile` far outside the support: one step of Newton's method on the log of the tail.

    For m = `outside` and depth t, -log(tail(m + t) / tail(m)) equals
    m t + t^2 / 2 + log(hazard(m + t) / hazard(m)). This is convex in t, with slope hazard(m) at 0 and
    second derivative 1 - O(1/m^2). The initial value from a parabola has relative error 1/m^4, and one
    step squares it.
    """
    hazard = outside / _series(outside)
    whole = _lost(outside, outside.new_tensor(width), hazard)
    target = whole.neg_().expm1_().mul_(share).log1p_().neg_()
    depth = 2 * target / (hazard.square().add_(2 * target).sqrt_().add_(hazard))
    end = outside + depth
    return depth - (_lost(outside, depth, hazard) - target) * _series(end) / end


def _lost(outside: "torch.Tensor", depth: "torch.Tensor", hazard: "torch.Tensor") -> "torch.Tensor":
    """-log(tail(outside + depth) / tail(outside))."""
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
    """Polynomial: the sum of coefficients[k] x^k."""
    total = x.mul(coefficients[-1])
    for coefficient in coefficients[-2:0:-1]:
        total.add_(coefficient).mul_(x)
    return total.add_(coefficients[0])
