"""Convolutions in one, two and three dimensions: per-sample gradients of the weight, and ghost norms."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hush.core.tape import CoordinateMask
from hush.gradients.precision import precise, to_autocast_dtype
from hush.gradients.products import (
    compare_grams,
    double_gram_error,
    product_error,
    record_gradients,
    uses_kernels,
)
from hush.gradients.rules.linear import OuterFactors
from hush.gradients.terms import (
    CHUNK_ENTRIES,
    Dense,
    Term,
    finite_norms,
    materialised_clamped_sum,
    zero_rows,
)

if TYPE_CHECKING:
    from hush.gradients.recording import Recording
    from hush.gradients.rules import Weight


@dataclass(frozen=True, eq=False)
class ConvolutionShape:
    """Shape of a convolution's weight, and its stride, padding (equal on both sides) and dilation."""

    shape: torch.Size
    """(out, in / groups, *kernel)."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, self._zero, self.groups
        )

    def input_gradient(self, grad: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return self._backward(grad, x, weight, self.groups, [True, False, False])[0]

    def weight_gradient(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight, summed over images."""
        like = grad.new_empty(1).expand(self.shape)
        return self._backward(grad, x, like, self.groups, [False, True, False])[1]

    def per_sample_weight_gradients(self, grad: Tensor, x: Tensor) -> Tensor:
        """The gradient of the weight for each image: (images, *shape)."""
        images, out = grad.shape[:2]
        small = math.prod(self.shape[2:]) == 1 or self.shape[1] < _FEW_CHANNELS
        if self.groups == 1 and (x.is_cuda or small or math.prod(self.shape) >= _LARGE):
            step = self.unfolded_at_once(grad) if x.is_cuda else images
            parts = [
                record_gradients(some.flatten(2).mT, self.unfold(inputs, grad.shape[2:]).mT)
                for some, inputs in zip(grad.split(step), x.split(step), strict=True)
            ]
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(images, *self.shape)
        # One grouped convolution: all images side by side as channels, a group of channels to each.
        # Strides afresh: those of one position could still say "channels last", and torch believes it.
        grads, inputs = (part.reshape(-1).view(1, -1, *part.shape[2:]) for part in (grad, x))
        like = grad.new_empty(1).expand(images * out, *self.shape[1:])
        _, stacked, _ = self._backward(grads, inputs, like, images * self.groups, [False, True, False])
        return stacked.view(images, *self.shape)

    def unfolded_at_once(self, grad: Tensor) -> int:
        """Images whose input patches are written out at the same time."""
        size = math.prod(self.shape[1:]) * math.prod(grad.shape[2:])
        return max(1, CHUNK_ENTRIES[grad.device.type] // size)

    def unfold(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """The input patch of each output position, as im2col: (images, in * kernel, positions)."""
        padded = functional.pad(x, [side for size in reversed(self.padding) for side in (size, size)])
        image, channel, *pixel = padded.stride()
        kernel = self.shape[2:]
        view = padded.as_strided(
            (*x.shape[:2], *kernel, *outputs),
            (
                image,
                channel,
                *(a * b for a, b in zip(pixel, self.dilation, strict=True)),
                *(a * b for a, b in zip(pixel, self.stride, strict=True)),
            ),
        )
        return view.reshape(len(x), math.prod(self.shape[1:]), math.prod(outputs))

    def patch_gram(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """Gram matrix of the input patches: (images, positions, positions).

        Its entries are sums over the kernel of inner products between two pixels: nothing is unfolded.
        """
        pixels = x.flatten(2).mT @ x.flatten(2)
        sizes = x.shape[2:]
        padding = [side for size in reversed(self.padding) for side in (size, size)]
        pixels = functional.pad(pixels.view(len(x), *sizes, *sizes), padding * 2)
        gram = x.new_zeros(len(x), *outputs, *outputs)
        for offset in itertools.product(*(range(size) for size in self.shape[2:])):
            axes = zip(offset, self.dilation, self.stride, outputs, strict=True)
            window = tuple(slice(k * d, k * d + s * (o - 1) + 1, s) for k, d, s, o in axes)
            gram += pixels[(slice(None), *window, *window)]
        return gram.view(len(x), math.prod(outputs), -1)

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
"""From this many weights on, or below this many channels, unfolding beats one grouped convolution."""

_MATERIALISE_RATIO = 4
"""As `linear.MATERIALISE_RATIO`; Gram matrices of convolutions pay off later (benchmarks/layers.py)."""


@dataclass(frozen=True, eq=False)
class ConvolutionFactors:
    """Per-sample gradients as a convolution's input and the gradient of its output."""

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
        return True

    def take(self, rows: Tensor | slice) -> "ConvolutionFactors":
        return ConvolutionFactors(self.grad[rows], self.x[rows], self.geometry)

    def mask_records(self, keep: Tensor) -> "ConvolutionFactors":
        return ConvolutionFactors(zero_rows(self.grad, keep), zero_rows(self.x, keep), self.geometry)

    def dense(self) -> Tensor:
        return precise(self.geometry.per_sample_weight_gradients(precise(self.grad), precise(self.x)))

    def of_units(self, count: int, scale: Tensor) -> Term:
        return self._unfolded().of_units(count, scale)

    def norms(self, order: float) -> Tensor:
        if order != 2 or uses_kernels(self.x) or self.grad[0, 0].numel() == 1:
            return torch.cat([part.norms(order) for _, part in self._chunks()])
        # Gram matrices from inner products between pixels: nothing is unfolded
        grad = self.grad.double().flatten(2)
        patches = self.geometry.patch_gram(self.x.double(), self.grad.shape[2:])
        shape = (self.records, grad.shape[2], math.prod(self.shape[1:]))
        error = double_gram_error(grad.mT.shape) + double_gram_error(torch.Size(shape))
        squares = compare_grams([(patches, grad.mT @ grad)], error)
        norms = squares.norms(product_error(precise(self.grad).flatten(2).mT))
        return finite_norms(norms, squares.lengths, precise(self.x).dtype)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = torch.zeros(self.shape, dtype=torch.float64, device=weights.device)
        for rows, part in self._chunks():
            total += part.weighted_sum(weights[rows])
        return total

    def _chunks(self) -> Iterator[tuple[slice, OuterFactors]]:
        """The factors as matrices, input patches written out, some records at a time."""
        step = self.geometry.unfolded_at_once(self.grad)
        for start in range(0, max(1, self.records), step):
            rows = slice(start, start + step)
            yield rows, self.take(rows)._unfolded()

    def _unfolded(self) -> OuterFactors:
        patches = self.geometry.unfold(self.x, self.grad.shape[2:])
        return OuterFactors(self.grad.flatten(2).mT, patches.mT, self.shape)

    def clamped_weighted_sum(
        self, weights: Tensor, limits: Tensor, mask: CoordinateMask | None
    ) -> Tensor:
        return materialised_clamped_sum(self, weights, limits, mask)


def convolution_term(grad: Tensor, x: Tensor, geometry: ConvolutionShape, records: int) -> Term:
    """The term of a convolution's weight, factored or materialised, whichever is cheaper.

    Several images may belong to a record.
    """
    factored = math.prod(grad.shape[1:]) + math.prod(x.shape[1:])
    cheaper = math.prod(geometry.shape) > _MATERIALISE_RATIO * factored
    if len(x) == records and geometry.groups == 1 and cheaper:
        return ConvolutionFactors(grad, x, geometry)
    by_image = geometry.per_sample_weight_gradients(grad, x)
    return Dense(by_image if len(x) == records else by_image.view(records, -1, *geometry.shape).sum(1))


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution of (records * count, channels, *positions)."""

    records: int
    weight: "Weight"
    bias: "Weight | None"
    geometry: ConvolutionShape

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        bias = None if self.bias is None else to_autocast_dtype(self.bias.value)
        return self.geometry.forward(x, to_autocast_dtype(self.weight.value), bias), (x,)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        (x,) = saved
        if self.weight.terms is not None:
            self.weight.terms.append(convolution_term(grad, x, self.geometry, self.records))
        if self.bias is not None and self.bias.terms is not None:
            by_image = grad.flatten(2).sum(-1)
            self.bias.terms.append(Dense(by_image.view(self.records, -1, by_image.shape[1]).sum(1)))
        if not needed[0]:
            return (None,)
        return (self.geometry.input_gradient(grad, x, self.weight.value.to(x.dtype)),)


def convolution(
    recording: "Recording",
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Any:
    """The rule for `torch.conv1d`, `conv2d` and `conv3d`."""
    weights = recording.as_weights(weight, bias)
    if weights is None or weights[0] is None:
        return NotImplemented
    axes = weight.dim() - 2
    dilations, paddings = _per_axis(dilation, axes), (0,) * axes
    if padding == "same":
        needed = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        paddings = tuple(size // 2 for size in needed)
        uneven = [size % 2 for size in needed]
        if any(uneven):
            x = functional.pad(x, [side for size in reversed(uneven) for side in (0, size)])
    elif padding != "valid":
        paddings = _per_axis(padding, axes)
    geometry = ConvolutionShape(weight.shape, _per_axis(stride, axes), paddings, dilations, groups)
    layer = Convolution(recording.records, weights[0], weights[1], geometry)

    def work(x: Tensor) -> Tensor:
        lead = x.dim() - axes - 1
        images = to_autocast_dtype(x).flatten(0, lead - 1)
        output: Tensor = recording.capture(layer, images).unflatten(0, x.shape[:lead])
        return output

    return recording.run_batched(work, x)


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)
