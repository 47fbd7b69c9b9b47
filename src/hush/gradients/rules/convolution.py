"""Convolutions in one, two and three dimensions: per-sample weight gradients and ghost norms."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.modules.utils import _ntuple

from hush.gradients.precision import SUM_BLOCK, precise, precise_dtype, to_autocast_dtype
from hush.gradients.products import (
    compare_grams,
    double_gram_error,
    gram,
    gram_chunks,
    product_error,
    record_gradients,
    uses_kernels,
)
from hush.gradients.rules.linear import OuterFactors, outer_product_term
from hush.gradients.terms import CHUNK_ENTRIES, Dense, Term, finite_norms, materialised_norms
from hush.gradients.tree import Gradients

if TYPE_CHECKING:
    from hush.gradients.recording import Recording
    from hush.gradients.rules import Weight

_LARGE, _FEW_CHANNELS = 2**16, 4
"""Unfolding is faster than a grouped convolution for at least `_LARGE` weights, or for fewer than
`_FEW_CHANNELS` channels."""


@dataclass(frozen=True, eq=False)
class ConvolutionShape:
    """Shape, stride, padding (equal on both sides), dilation and groups of a convolution."""

    shape: torch.Size
    """Shape of the weight: (out, in / groups, *kernel)."""
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        offset = (0,) * len(self.stride)
        return torch.convolution(
            x, weight, bias, self.stride, self.padding, self.dilation, False, offset, self.groups
        )

    def backward(
        self, grad: Tensor, x: Tensor, weight: Tensor, groups: int, needed: tuple[bool, bool]
    ) -> tuple[Tensor, Tensor]:
        """Gradient of the input, and gradient of the weight summed over images."""
        offset = (0,) * len(self.stride)
        shape = self.stride, self.padding, self.dilation, False, offset, groups
        gradients = torch.ops.aten.convolution_backward(grad, x, weight, None, *shape, [*needed, False])
        return gradients[0], gradients[1]

    def per_sample_weight_gradients(self, grad: Tensor, x: Tensor, *, tf32: bool = False) -> Tensor:
        """Per-image gradients of the weight: (images, *shape), in at least single precision."""
        images, out = grad.shape[:2]
        if self.has_kernel(x):
            from hush.gradients.kernels.convolution_kernel import weighted_block_sums

            ones = torch.ones(images, device=x.device)
            return weighted_block_sums(grad, x, ones, self, 1, tf32=tf32)
        small = math.prod(self.shape[2:]) == 1 or self.shape[1] < _FEW_CHANNELS
        if self.groups == 1 and (x.is_cuda or small or math.prod(self.shape) >= _LARGE):
            step = self.unfolded_at_once(grad) if x.is_cuda else images
            parts = [
                record_gradients(some.flatten(2).mT, self.unfold(inputs, grad.shape[2:]).mT)
                for some, inputs in zip(grad.split(step), x.split(step), strict=True)
            ]
            return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(images, *self.shape)
        # One grouped convolution with the images as channel groups. The view resets the strides, because
        # torch may interpret the strides of a single position as "channels last".
        grads, inputs = (part.reshape(-1).view(1, -1, *part.shape[2:]) for part in (grad, x))
        like = grad.new_empty(1).expand(images * out, *self.shape[1:])
        _, stacked = self.backward(grads, inputs, like, images * self.groups, (False, True))
        return stacked.view(images, *self.shape)

    def unfolded_at_once(self, grad: Tensor) -> int:
        """Number of images to unfold at a time."""
        size = math.prod(self.shape[1:]) * math.prod(grad.shape[2:])
        return max(1, CHUNK_ENTRIES[grad.device.type] // size)

    def unfold(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """Input patches of the output positions (im2col): (images, in * kernel, positions)."""
        size = math.prod(self.shape[1:]), math.prod(outputs)
        return self._windows(x, outputs).reshape(len(x), *size)

    def patches(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """Input patches as rows, like the inputs of a linear layer: (images, positions, in * kernel)."""
        axes = len(outputs)
        windows = self._windows(x, outputs).movedim(tuple(range(-axes, 0)), tuple(range(1, 1 + axes)))
        return windows.reshape(len(x), math.prod(outputs), math.prod(self.shape[1:]))

    def patch_gram(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """Gram matrices of the input patches: (images, positions, positions).

        An entry is the sum over kernel positions of the inner products of two pixels. The input is
        unfolded only if the patches have fewer entries than the Gram matrix of the pixels.
        """
        sizes = x.shape[2:]
        if math.prod(outputs) * math.prod(self.shape[1:]) < math.prod(sizes) ** 2:
            return gram(self.patches(x, outputs))
        pixels = x.flatten(2).mT @ x.flatten(2)
        pixels = functional.pad(pixels.view(len(x), *sizes, *sizes), _both_sides(self.padding) * 2)
        gram_matrix = x.new_zeros(len(x), *outputs, *outputs)
        for offset in itertools.product(*(range(size) for size in self.shape[2:])):
            axes = zip(offset, self.dilation, self.stride, outputs, strict=True)
            window = tuple(slice(k * d, k * d + s * (o - 1) + 1, s) for k, d, s, o in axes)
            gram_matrix += pixels[(slice(None), *window, *window)]
        return gram_matrix.view(len(x), math.prod(outputs), -1)

    def has_kernel(self, x: Tensor) -> bool:
        """Whether the Triton kernel supports this convolution and input."""
        sizes = zip(x.shape[2:], self.padding, self.stride, strict=True)
        pixels = math.prod(size + 2 * sides + step + 4 for size, sides, step in sizes)
        # offsets within a record that is unfolded along its width must fit in 32 bits
        fits = pixels * max(self.shape[0], self.shape[1] * self.shape[-1]) < 2**31
        return self.groups == 1 and len(self.stride) <= 2 and fits and uses_kernels(x)

    def _windows(self, x: Tensor, outputs: torch.Size) -> Tensor:
        """Sliding windows over the padded input, as a view: (images, in, *kernel, *positions)."""
        padded = functional.pad(x, _both_sides(self.padding))
        image, channel, *pixel = padded.stride()
        steps = zip((*pixel, *pixel), (*self.dilation, *self.stride), strict=True)
        size = (*x.shape[:2], *self.shape[2:], *outputs)
        return padded.as_strided(size, (image, channel, *(a * b for a, b in steps)))


_MATERIALISE_RATIO = {"cpu": 4, "cuda": 1}
"""Same as `linear.MATERIALISE_RATIO`, for convolutions. On a CPU, Gram matrices of convolutions are
slower than Gram matrices of linear layers (benchmarks/layers.py). On a GPU with fewer than about 250
positions, computing gradients twice (for norms and sum) is faster than storing them."""


@dataclass(frozen=True, eq=False)
class ConvolutionFactors(Term):
    """Per-sample gradients of a convolution's weight, stored as its input and output gradient."""

    grad: Tensor
    x: Tensor
    geometry: ConvolutionShape
    tf32: bool = False
    """Whether the kernel may use TensorFloat-32 for norms and sums."""

    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        return self.geometry.shape

    def rounding_bounded(self, records: int) -> bool:
        # for the kernel, only a test on a GPU verifies that norms and sums agree
        return not self.geometry.has_kernel(self.x)

    def dense(self) -> Tensor:
        if self.geometry.has_kernel(self.x):
            return self.geometry.per_sample_weight_gradients(self.grad, self.x, tf32=self.tf32)
        return precise(self.geometry.per_sample_weight_gradients(precise(self.grad), precise(self.x)))

    def of_units(self, count: int, scale: Tensor) -> Term:
        return self._unfolded().of_units(count, scale)

    def norms(self, order: float) -> Tensor:
        if self.geometry.has_kernel(self.x):  # norms and sums use the same program
            if order != 2:
                return materialised_norms(self, order, self.x.device)
            from hush.gradients.kernels.convolution_kernel import squared_norms

            return squared_norms(self.grad, self.x, self.geometry, tf32=self.tf32).sqrt().float()
        positions = math.prod(self.grad.shape[2:])
        if order != 2 or positions == 1:
            return torch.cat([part.norms(order) for _, part in self._chunks()])
        # compute Gram matrices from inner products of pixels, without unfolding
        outputs, patch_gram = self.grad.shape[2:], self.geometry.patch_gram
        pixels = max(positions, math.prod(self.x.shape[2:]))
        pairs = (
            (patch_gram(self.x[rows].double(), outputs), gram(self.grad[rows].flatten(2).mT))
            for rows in gram_chunks(self.records, pixels)
        )
        entries = self.shape[0], math.prod(self.shape[1:])
        error = sum(double_gram_error(positions, size) for size in entries)
        squares = compare_grams(pairs, error)
        norms = squares.norms(product_error(precise(self.grad).flatten(2).mT))
        return finite_norms(norms, squares.lengths, precise_dtype(self.x))

    def weighted_sum(self, weights: Tensor) -> Tensor:
        if self.geometry.has_kernel(self.x):
            from hush.gradients.kernels.convolution_kernel import weighted_block_sums

            blocks = weighted_block_sums(
                self.grad, self.x, weights.float(), self.geometry, SUM_BLOCK, tf32=self.tf32
            )
            return blocks.sum(0, dtype=torch.float64)
        total = torch.zeros(self.shape, dtype=torch.float64, device=weights.device)
        for rows, part in self._chunks():
            total += part.weighted_sum(weights[rows])
        return total

    def _chunks(self) -> Iterator[tuple[slice, OuterFactors]]:
        """Outer-product factors with unfolded inputs, in chunks of records."""
        step = self.geometry.unfolded_at_once(self.grad)
        for start in range(0, max(1, self.records), step):
            rows = slice(start, start + step)
            yield rows, self.take(rows)._unfolded()

    def _unfolded(self) -> OuterFactors:
        patches = self.geometry.unfold(self.x, self.grad.shape[2:])
        return OuterFactors(self.grad.flatten(2).mT, patches.mT, self.shape)


def convolution_term(grad: Tensor, x: Tensor, geometry: ConvolutionShape, records: int) -> Term:
    """Term of a convolution's weight, factored or materialised depending on the cost.

    Each record may have several images.
    """
    kernel = tuple(geometry.shape[2:])
    apart = geometry.stride == kernel and not any(geometry.padding) and set(geometry.dilation) == {1}
    pointwise = math.prod(kernel) == 1 and geometry.has_kernel(x)
    if apart and geometry.groups == 1 and not pointwise:  # a linear layer on disjoint patches
        left, right = grad.flatten(2).mT, geometry.patches(x, grad.shape[2:])
        if len(x) != records:
            images = records, len(x) // records
            left, right = (part.unflatten(0, images).flatten(1, 2) for part in (left, right))
        return outer_product_term(left, right, geometry.shape)
    tf32 = x.is_cuda and torch.backends.cudnn.allow_tf32
    factored = math.prod(grad.shape[1:]) + math.prod(x.shape[1:])
    large = math.prod(geometry.shape) > _MATERIALISE_RATIO[x.device.type] * factored
    supported = geometry.has_kernel(x) or not uses_kernels(x)  # there is no kernel for three dimensions
    if len(x) == records and geometry.groups == 1 and large and supported:
        return ConvolutionFactors(grad, x, geometry, tf32)
    by_image = geometry.per_sample_weight_gradients(grad, x, tf32=tf32)
    return Dense(by_image if len(x) == records else by_image.view(records, -1, *geometry.shape).sum(1))


@dataclass(frozen=True, eq=False)
class Convolution:
    """Convolution of inputs of shape (records * count, channels, *positions)."""

    records: int
    weight: "Weight"
    bias: "Weight | None"
    geometry: ConvolutionShape

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        bias = None if self.bias is None else to_autocast_dtype(self.bias.value)
        return self.geometry.forward(x, to_autocast_dtype(self.weight.value), bias), (x,)

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]) -> Gradients:
        (x,) = saved
        if self.weight.terms is not None:
            self.weight.terms.append(convolution_term(grad, x, self.geometry, self.records))
        if self.bias is not None and self.bias.terms is not None:
            by_image = grad.flatten(2).sum(-1)
            self.bias.terms.append(Dense(by_image.view(self.records, -1, by_image.shape[1]).sum(1)))
        if not needed[0]:
            return (None,)
        weight = self.weight.value.to(x.dtype)
        return (self.geometry.backward(grad, x, weight, self.geometry.groups, (True, False))[0],)


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
    """Rule for `torch.conv1d`, `conv2d` and `conv3d`."""
    weights = recording.as_weights(weight, bias)
    if weights is None and not recording.of_records_and_constants(x, weight, bias):
        return NotImplemented
    axes = weight.dim() - 2
    per_axis = _ntuple(axes)
    dilations, paddings = per_axis(dilation), (0,) * axes
    if padding == "same":
        needed = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
        paddings = tuple(size // 2 for size in needed)
        uneven = [size % 2 for size in needed]
        if any(uneven):
            x = functional.pad(x, [side for size in reversed(uneven) for side in (0, size)])
    elif padding != "valid":
        paddings = per_axis(padding)
    geometry = ConvolutionShape(weight.shape, per_axis(stride), paddings, dilations, groups)

    def work(x: Tensor) -> Tensor:
        lead = x.dim() - axes - 1
        images = to_autocast_dtype(x).flatten(0, lead - 1)
        if weights is None:
            shift = None if bias is None else to_autocast_dtype(bias)
            output = geometry.forward(images, to_autocast_dtype(weight), shift)
        else:
            assert weights[0] is not None
            layer = Convolution(recording.records, weights[0], weights[1], geometry)
            output = recording.capture(layer, images)
        return torch.unflatten(output, 0, x.shape[:lead])

    return recording.run_batched(work, x)


def _both_sides(padding: Sequence[int]) -> list[int]:
    """Convert padding to the order of `F.pad`: last dimension first, both sides."""
    return [side for size in reversed(padding) for side in (size, size)]
