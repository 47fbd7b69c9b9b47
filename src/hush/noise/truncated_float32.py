"""Truncated normal draws in single precision: the inverse cdf without a double or an allocation.

As good as torch's own normal draws in single precision: shares are multiples of 2**-24, so a draw is at
most some 5.4 deviations from a location inside the support. `hush.noise.truncated` has the double one.
"""

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    Tensors = list[torch.Tensor]

AT_ONCE = {"cpu": 2**16, "cuda": 2**24}
NARROW = 0.2
"""Width in deviations below which a tail in single precision is too coarse for places in the support."""
_FAR = 8.0
"""Deviations outside the support from which the log of the tail is inverted by its derivatives."""
_FARTHEST = 1e9
"""Deviations from which all draws are at the end of the support, as far as single precision can tell."""
_NOTHING = 11.3
"""Deviations with less beyond them than can be seen beside the tail at _FAR, and no denormal number."""
ABOVE = (-3.169146076, -9.956167441, 6.791834653, 10.371648548, 1.592575536)
BELOW = (1.0, 7.195741002, 7.363518976, 1.125664101)
"""The tail of chance exp(-r^2), up to 1/2, begins at above(r) / below(r) to 1e-7 of .3 and itself."""


class SingleTruncated:
    """Memory for draws of up to `size` numbers: asking for it anew takes longer than the arithmetic."""

    def __init__(self, scale: float, bound: float, size: int, device: "torch.device") -> None:
        import torch

        self.scale, self.bound, self.width = scale, bound, 2 * bound / scale
        self._memory = torch.empty(9, size, dtype=torch.float32, device=device)

    def draw(self, location: "torch.Tensor", generator: "torch.Generator") -> None:
        """Replace each of a few locations by a draw around it.

        The same operations on every number, near formula and far: time says nothing about where it is.
        """
        import torch

        outside, share, depth, *memory = self._memory[:, : len(location)]
        outside.copy_(location).abs_().sub_(self.bound).div_(self.scale)
        if generator.device == share.device:
            share.uniform_(generator=generator)
        else:
            share.copy_(torch.rand(len(share), generator=generator, device=generator.device))
        self.quantile(outside, share, depth, memory)
        depth.mul_(-self.scale).add_(self.bound).clamp_(-self.bound, self.bound)
        # +1 or -1, the side the location is on; 0 is on the upper one
        location.copy_(depth.mul_(torch.copysign(outside.fill_(1.0), location.float(), out=outside)))

    def quantile(
        self, outside: "torch.Tensor", share: "torch.Tensor", depth: "torch.Tensor", memory: "Tensors"
    ) -> None:
        """`hush.noise.truncated.quantile` into `depth`, for shares that are multiples of 2**-24.

        `outside` is written over.
        """
        import torch

        near, *rest = memory
        _near(outside, self.width, share, near, rest)
        _far(outside, self.width, share, depth, rest)
        # 0 or 1, or between where both formulas say the same; torch.where takes four times as long
        weight = outside.sub_(_FAR).mul_(1e6).clamp_(0.0, 1.0)
        torch.lerp(near, depth, weight, out=depth)
        depth.clamp_(0.0, self.width)


def _near(
    outside: "torch.Tensor",
    width: float,
    share: "torch.Tensor",
    depth: "torch.Tensor",
    memory: "Tensors",
) -> None:
    """Up to 8 deviations outside: the tail beyond the draw, and where a tail that large begins."""
    import torch

    beyond, rest, root, *_ = memory
    torch.clamp(outside, max=_FAR, out=beyond).mul_(math.sqrt(0.5)).erfc_()
    torch.add(outside, width, out=rest).clamp_(max=_NOTHING).mul_(math.sqrt(0.5)).erfc_().mul_(share)
    # (1 - share) near + share rest, all positive: the smallest tail keeps its digits
    beyond.mul_(torch.neg(share, out=root).add_(1.0)).add_(rest).mul_(0.5)
    # the smaller of the tail and the rest, which is a multiple of 2**-24 or rounded to 0
    torch.neg(beyond, out=root).add_(1.0).clamp_(min=2.0**-25)
    torch.minimum(root, beyond, out=root).log_().neg_().sqrt_()
    polynomial(ABOVE, root, depth).div_(polynomial(BELOW, root, rest))
    torch.copysign(depth, beyond.neg_().add_(0.5), out=depth)
    depth.sub_(outside)


def _far(
    outside: "torch.Tensor",
    width: float,
    share: "torch.Tensor",
    depth: "torch.Tensor",
    memory: "Tensors",
) -> None:
    """Far outside, by the first three derivatives of the log of the tail.

    With h the hazard at m outside, minus the log of tail(m + t) / tail(m) is
    h (t + a t^2 / 2 + b t^3 / 6), a = h - m = O(1/m) and b = h'' / h = O(1/m^4); what is left out is
    t^3 / 4 m^5 of t. Solved as a parabola, whose root the cubic term moves by a tiny share. Nothing
    cancels.
    """
    import torch

    inverse, w, mills, bend, twist = memory
    torch.clamp(outside, _FAR, _FARTHEST, out=inverse).reciprocal_()
    torch.square(inverse, out=w)
    # Mills' ratio is (1 - w e) / m (Abramowitz and Stegun 26.2.12; left out: 945 w^5)
    polynomial((1.0, -3.0, 15.0, -105.0), w, bend)
    torch.mul(w, bend, out=mills).neg_().add_(1.0)
    bend.mul_(inverse).div_(mills)  # a
    torch.mul(w, 50.0, out=twist).sub_(4.0).mul_(w).add_(1 / 3).mul_(mills)  # b / 6 w^2
    mills.mul_(inverse)  # 1 / h
    # to the end of the support; squares are of what is no denormal number
    torch.mul(w, width, out=depth).clamp_(min=1e-9).square_().mul_(twist)
    depth.add_(bend, alpha=width / 2).add_(1.0).mul_(width).div_(mills).neg_().expm1_()
    target = mills.mul_(depth.mul_(share).log1p_().neg_())
    torch.mul(target, bend, out=depth).mul_(2.0).add_(1.0).sqrt_().add_(1.0).reciprocal_()
    depth.mul_(target).mul_(2.0)
    slope = bend.mul_(depth).add_(1.0)
    # what the cubic term moves the root by, relatively
    moved = w.mul_(depth).clamp_(min=1e-9).square_().mul_(twist).div_(slope)
    depth.mul_(moved.neg_().add_(1.0))


def polynomial(
    coefficients: tuple[float, ...], x: "torch.Tensor", out: "torch.Tensor"
) -> "torch.Tensor":
    """The sum of coefficients[k] x^k."""
    import torch

    torch.mul(x, coefficients[-1], out=out)
    for coefficient in coefficients[-2:0:-1]:
        out.add_(coefficient).mul_(x)
    return out.add_(coefficients[0])
