"""Truncated Gaussian noise: a normal draw conditioned on a fixed support."""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from hush.core.parts import Noise, Proof
from hush.core.randomness import Randomness, uniform
from hush.noise.exact.ziggurat import grid_spacing
from hush.noise.post_processed import BOUND, PROOFS, NormalOnSupport
from hush.noise.truncated_float32 import ABOVE, AT_ONCE, BELOW, NARROW, SingleTruncated, polynomial

if TYPE_CHECKING:
    import torch

_FAR = 16.0
"""Deviations outside the support from which the inverse cdf is taken in logarithms."""
_NOTHING = 30.0
"""Deviations with less beyond them than can be seen beside the tail at _FAR, and no denormal number."""
_AT_ONCE = {"cpu": 2**15, "cuda": 2**24}


@dataclass(frozen=True, kw_only=True)
class Truncated(NormalOnSupport, Noise):
    """A normal draw around the sum, of standard deviation `scale`, given that it is in [-bound, bound].

    Args:
        scale: Standard deviation of the draw, absolute: of the sum, not in clipping norms.
        bound: End of the support, absolute.

    **Guarantee.** Charged as the whole normal law: docs/guarantees/bounded.md. Drawn by the inverse cdf,
    with the same work whatever the location: rejection sampling would tell the records by its time.
    """

    proofs: ClassVar[tuple[Proof, ...]] = PROOFS

    bound: float = field(metadata=BOUND)

    @classmethod
    def examples(cls, deviation: float, *, blocks: int, reference_norm: float) -> tuple[Noise, ...]:
        return (cls(scale=deviation, bound=2.0),)

    def privatize(
        self, location: "torch.Tensor", *, norm: float, generator: Randomness
    ) -> "torch.Tensor":
        import torch

        if not location.numel():
            return location
        flat, device = location.view(-1), location.device
        # which formula is decided by what is public; secure draws come with all bits of a double
        coarse = location.dtype != torch.float64 and self._width >= NARROW
        if coarse and isinstance(generator, torch.Generator):
            at_once = AT_ONCE[device.type]
            single = SingleTruncated(self.scale, self.bound, min(at_once, len(flat)), device)
            for part in flat.split(at_once):
                single.draw(part, generator)
            return location
        step = grid_spacing(self.scale) * 2.0**-16
        for part in flat.split(_AT_ONCE[device.type]):
            share = uniform(len(part), generator).to(part.device)
            depth = quantile(part.double().abs().sub_(self.bound).div_(self.scale), self._width, share)
            drawn = depth.mul_(-self.scale).add_(self.bound)
            # on a grid: the lowest bits of a double tell which of two locations it was drawn around
            drawn = drawn.div_(step).round_().mul_(step).clamp_(-self.bound, self.bound)
            part.copy_(drawn.where(part >= 0, -drawn))
        return location

    @property
    def _width(self) -> float:
        return 2 * self.bound / self.scale


def quantile(outside: "torch.Tensor", width: float, share: "torch.Tensor") -> "torch.Tensor":
    """Quantiles of the truncated law: the distance from the support's nearer end, in deviations.

    The location is `outside` of that end (negative: inside the support), and a `share` of all draws
    are less deep.
    """
    depth = _near(outside.clamp(max=_FAR), width, share)
    far = _far(outside.clamp(min=_FAR), width, share)
    return far.where(outside > _FAR, depth).clamp_(0.0, width)


def _near(outside: "torch.Tensor", width: float, share: "torch.Tensor") -> "torch.Tensor":
    """`quantile` in and near the support: the tail beyond the draw, and where a tail that large begins.

    By a rational function that is right to 5e-5, and a step of Halley's method, which cubes that.
    torch.special.ndtri would not do: it takes three times as long for some numbers as for others.
    """
    import torch

    # erfc, not torch.special.ndtr, which is 1 + erf and knows no tail
    beyond = _tail(outside).mul_(1 - share).add_(_tail((outside + width).clamp_(max=_NOTHING)) * share)
    # the smaller of the tail and the rest, which is a multiple of 2**-53 or rounded to 0
    smaller = torch.minimum(beyond, (1 - beyond).clamp_(min=2.0**-54))
    root = smaller.log().neg_().sqrt_()
    place = polynomial(ABOVE, root, torch.empty_like(root))
    place.div_(polynomial(BELOW, root, torch.empty_like(root)))
    density = place.square().mul_(-0.5).exp_().mul_(1 / math.sqrt(2 * math.pi))
    step = _tail(place).sub_(smaller).div_(density)
    place.add_(step.div_(1 - place * step / 2))
    return torch.copysign(place, beyond.neg_().add_(0.5)).sub_(outside)


def _far(outside: "torch.Tensor", width: float, share: "torch.Tensor") -> "torch.Tensor":
    """`quantile` far outside: one step of Newton's method on the log of the tail.

    With m outside and the depth t, minus the log of tail(m + t) / tail(m) is
    m t + t^2 / 2 + log(hazard(m + t) / hazard(m)), convex in t, of slope hazard(m) at 0 and of second
    derivative 1 - O(1/m^2): the parabola's depth is off by 1/m^4 relatively, and a step squares it.
    """
    hazard = outside / _series(outside)
    whole = _lost(outside, outside.new_tensor(width), hazard)
    target = whole.neg_().expm1_().mul_(share).log1p_().neg_()
    depth = 2 * target / (hazard.square().add_(2 * target).sqrt_().add_(hazard))
    end = outside + depth
    return depth - (_lost(outside, depth, hazard) - target) * _series(end) / end


def _lost(outside: "torch.Tensor", depth: "torch.Tensor", hazard: "torch.Tensor") -> "torch.Tensor":
    """Minus the log of the tail probability beyond `depth`, relative to the tail outside."""
    end = outside + depth
    return end.div(_series(end)).div_(hazard).log_().add_((outside + depth / 2).mul_(depth))


def _series(x: "torch.Tensor") -> "torch.Tensor":
    """x tail(x) / density(x) (Abramowitz and Stegun 26.2.12); the first term left out is 945 x^-10."""
    w = x.square().reciprocal_()
    series = w.mul(-7).add_(1).mul_(w).mul_(-5).add_(1).mul_(w).mul_(-3).add_(1).mul_(w)
    return series.neg_().add_(1)


def _tail(x: "torch.Tensor") -> "torch.Tensor":
    return x.mul(math.sqrt(0.5)).erfc_().mul_(0.5)
