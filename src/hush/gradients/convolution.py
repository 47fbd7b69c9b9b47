"""Gradients of a convolution's weights, one per record."""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from hush.core.tape import CoordinateMask
from hush.gradients.cancellation import (
    cancelling_apart,
    few_enough,
    nan_if_cancelled,
    norms_or_recompute,
    product_bound,
)
from hush.gradients.terms import Dense, Term, clamped_sum_of_rows, materialised_norms, precise, zero_rows


@dataclass(frozen=True, eq=False)
class ConvolutionShape:
    """Where a convolution looks. The padding is the same on both sides."""

    shape: torch.Size
    """Of the weight: (out, in / groups, *kernel)."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def apply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, self._zero, self.groups
        )

    def back(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """The gradient of the input."""
        return self._backward(grad, x, weight, self.groups, [True, False, False])[0]

    def weight(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight, summed over the images."""
        like = grad.new_empty(1).expand(self.shape)
        return self._backward(grad, x, like, self.groups, [False, True, False])[1]

    def weight_each(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight for each image."""
        images, out = grad.shape[:2]
        small = math.prod(self.shape[2:]) == 1 or self.shape[1] < _FEW_CHANNELS
        if self.groups == 1 and (small or math.prod(self.shape) >= _LARGE):
            return (grad.flatten(2) @ self.unfolded(x, grad.shape[2:]).mT).view(images, *self.shape)
        # All images side by side as the channels of one, a group of channels to each.
        # Strides afresh: those of one position could still say "channels last", and torch believes it.
        wide, seen = (part.reshape(-1).view(1, -1, *part.shape[2:]) for part in (grad, x))
        like = grad.new_empty(1).expand(images * out, *self.shape[1:])
        _, each, _ = self._backward(wide, seen, like, images * self.groups, [False, True, False])
        return each.view(images, *self.shape)

    def unfolded(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """What each output position looks at: (images, in * kernel, positions)."""
        padded = functional.pad(x, [side for size in reversed(self.padding) for side in (size, size)])
        image, channel, *places = padded.stride()
        kernel = self.shape[2:]
        view = padded.as_strided(
            (*x.shape[:2], *kernel, *outputs),
            (
                image,
                channel,
                *(a * b for a, b in zip(places, self.dilation, strict=True)),
                *(a * b for a, b in zip(places, self.stride, strict=True)),
            ),
        )
        return view.reshape(len(x), -1, math.prod(outputs))

    def unfolded_gram(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """The inner products of what two output positions look at: (images, positions, positions).

        Those are sums, over the places of the kernel, of inner products between two pixels.
        """
        pixels = x.flatten(2).mT @ x.flatten(2)
        sizes = x.shape[2:]
        padding = [side for size in reversed(self.padding) for side in (size, size)]
        pixels = functional.pad(pixels.view(len(x), *sizes, *sizes), padding * 2)
        total = x.new_zeros(len(x), *outputs, *outputs)
        for place in itertools.product(*(range(size) for size in self.shape[2:])):
            steps = zip(place, self.dilation, self.stride, outputs, strict=True)
            seen = tuple(slice(k * d, k * d + s * (o - 1) + 1, s) for k, d, s, o in steps)
            total += pixels[(slice(None), *seen, *seen)]
        return total.view(len(x), math.prod(outputs), -1)

    @property
    def _zero(self) -> tuple[int, ...]:
        return (0,) * len(self.stride)

    def _backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, groups: int, mask: list[bool]
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
            grad,
            x,
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            self._zero,
            groups,
            mask,
        )
        return parts


_LARGE, _FEW_CHANNELS = 2**16, 4
"""From this many weights on, or below this many channels, unfolding beats one convolution in groups."""

_FEWER = 4
"""As for other factors, but the Gram matrices of a convolution pay off later (benchmarks/layers.py)."""


@dataclass(frozen=True, eq=False)
class Patches:
    """A convolution's input and the gradient of its output, for each record."""

    grad: Tensor
    x: Tensor
    geometry: ConvolutionShape

    @property
    def records(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> torch.Size:
        return self.geometry.shape

    def rounding_bounded(self, records: int) -> bool:
        return few_enough(self.x, records, self.grad[0, 0].numel())

    def take(self, rows: Tensor | slice) -> "Patches":
        return Patches(self.grad[rows], self.x[rows], self.geometry)

    def zeroed(self, keep: Tensor) -> "Patches":
        return Patches(zero_rows(self.grad, keep), zero_rows(self.x, keep), self.geometry)

    def dense(self) -> Tensor:
        return precise(self.geometry.weight_each(precise(self.grad), precise(self.x)))

    def norms(self, order: float) -> Tensor:
        if order != 2:
            return nan_if_cancelled(materialised_norms(self, order), self.lengths())
        grad, x = self.grad.double(), self.x.double()
        outputs = grad.shape[2:]
        inner = self.geometry.unfolded_gram(x, outputs)
        flat = grad.flatten(2)
        squares = (inner * (flat.mT @ flat)).sum((1, 2))
        seen = inner.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()
        bound = (seen * torch.linalg.vector_norm(flat, dim=1)).sum(1)
        return norms_or_recompute(
            self, squares, torch.maximum(bound, self.lengths()), precise(self.x).dtype
        )

    def weighted_sum(self, weights: Tensor, most: float = math.inf) -> Tensor:
        return cancelling_apart(self, weights, most)

    def lengths(self) -> Tensor:
        """A bound on what each number of a record's gradient can be on the way, place after place."""
        factors = [part.flatten(1).double() for part in (self.grad, self.x)]
        left, right = (torch.linalg.vector_norm(part, dim=1) for part in factors)
        return product_bound(left[:, None], right[:, None], precise(self.x).dtype)

    def direct(self, weights: Tensor) -> Tensor:
        """The sum, place by place."""
        grad, x = precise(self.grad), precise(self.x)
        if len(x) == 0:
            return torch.zeros(self.shape, dtype=torch.float64, device=x.device)
        each = weights.to(grad.dtype).view(-1, *[1] * (grad.dim() - 1))
        return self.geometry.weight(grad * each, x).double()

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, thin: CoordinateMask | None
    ) -> Tensor:
        return clamped_sum_of_rows(self, weights, limits, thin)


def patches(grad: Tensor, x: Tensor, geometry: ConvolutionShape, records: int) -> Term:
    """The term of a convolution in the cheaper form; several images may belong to a record."""
    kept = math.prod(grad.shape[1:]) + math.prod(x.shape[1:])
    if len(x) == records and geometry.groups == 1 and math.prod(geometry.shape) > _FEWER * kept:
        return Patches(grad, x, geometry)
    each = geometry.weight_each(grad, x)
    return Dense(each if len(x) == records else each.view(records, -1, *geometry.shape).sum(1))
