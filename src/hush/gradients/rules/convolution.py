"""Convolutions in one, two and three dimensions: per-sample gradients of the weight, and ghost norms."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hush.core.tape import CoordinateMask
from hush.gradients.precision import SUM_BLOCK, precise, precise_dtype, to_autocast_dtype
from hush.gradients.products import (
    compare_grams,
    double_gram_error,
    gram,
    gram_chunks,
    product_error,
    uses_kernels,
)
from hush.gradients.rules.convolution_shape import ConvolutionShape
from hush.gradients.rules.linear import OuterFactors, outer_product_term
from hush.gradients.terms import (
    Dense,
    Term,
    by_unit,
    finite_norms,
    materialised_clamped_sum,
    materialised_norms,
    zero_rows,
)

if TYPE_CHECKING:
    from hush.gradients.recording import Recording
    from hush.gradients.rules import Weight


_MATERIALISE_RATIO = {"cpu": 4, "cuda": 1}
"""As `linear.MATERIALISE_RATIO`. On a CPU Gram matrices of convolutions pay off later than those of
linear layers (benchmarks/layers.py). On a GPU gradients that are not kept are formed twice, to be
measured and to be added: below some 250 positions that is faster than to write and read them."""


@dataclass(frozen=True, eq=False)
class ConvolutionFactors:
    """Per-sample gradients as a convolution's input and the gradient of its output."""

    grad: Tensor
    x: Tensor
    geometry: ConvolutionShape
    tf32: bool = False
    """Whether a kernel may multiply in TensorFloat-32; the same for norms and sums."""

    @property
    def records(self) -> int:
        return len(self.x)

    @property
    def shape(self) -> torch.Size:
        return self.geometry.shape

    def rounding_bounded(self, records: int) -> bool:
        # that a kernel adds what it measured is held by a test on a GPU alone
        return not self.geometry.has_kernel(self.x)

    def take(self, rows: Tensor | slice) -> "ConvolutionFactors":
        return replace(self, grad=self.grad[rows], x=self.x[rows])

    def mask_records(self, keep: Tensor) -> "ConvolutionFactors":
        return replace(self, grad=zero_rows(self.grad, keep), x=zero_rows(self.x, keep))

    def dense(self) -> Tensor:
        if self.geometry.has_kernel(self.x):
            return self.geometry.per_sample_weight_gradients(self.grad, self.x, tf32=self.tf32)
        if uses_kernels(self.x):
            return torch.cat([part.dense() for _, part in self._chunks()])
        return precise(self.geometry.per_sample_weight_gradients(precise(self.grad), precise(self.x)))

    def of_units(self, count: int, scale: Tensor) -> Term:
        return self._unfolded().of_units(count, scale)

    def norms(self, order: float) -> Tensor:
        if self.geometry.has_kernel(self.x):
            return self._kernel_norms(order)
        positions = math.prod(self.grad.shape[2:])
        if order != 2 or uses_kernels(self.x) or positions == 1:
            return torch.cat([part.norms(order) for _, part in self._chunks()])
        # Gram matrices from inner products between pixels: nothing is unfolded
        outputs = self.grad.shape[2:]
        pixels = max(positions, math.prod(self.x.shape[2:]))
        pairs = (
            (
                self.geometry.patch_gram(self.x[rows].double(), outputs),
                gram(self.grad[rows].flatten(2).mT),
            )
            for rows in gram_chunks(self.records, pixels)
        )
        entries = self.shape[0], math.prod(self.shape[1:])
        error = sum(double_gram_error(torch.Size((self.records, positions, size))) for size in entries)
        squares = compare_grams(pairs, error)
        norms = squares.norms(product_error(precise(self.grad).flatten(2).mT))
        return finite_norms(norms, squares.lengths, precise_dtype(self.x))

    def _kernel_norms(self, order: float) -> Tensor:
        """Norms of what `weighted_sum` adds, formed by the same program: nothing to allow for."""
        if order != 2:
            return materialised_norms(self, order, self.x.device)
        from hush.gradients.kernels.convolution_kernel import squared_norms

        return squared_norms(self.grad, self.x, self.geometry, tf32=self.tf32).sqrt().float()

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
    if len(x) != records and geometry.pointwise:
        grad, x = (_side_by_side(part, records) for part in (grad, x))
    outputs = grad.shape[2:]
    if geometry.splits_input and not (geometry.has_kernel(x) and math.prod(geometry.shape[2:]) == 1):
        left, right = grad.flatten(2).mT, geometry.patches(x, outputs)
        if len(x) != records:
            left, right = by_unit(left, len(x) // records), by_unit(right, len(x) // records)
        return outer_product_term(left, right, geometry.shape)
    tf32 = x.is_cuda and torch.backends.cudnn.allow_tf32
    factored = math.prod(grad.shape[1:]) + math.prod(x.shape[1:])
    large = math.prod(geometry.shape) > _MATERIALISE_RATIO[x.device.type] * factored
    if len(x) == records and geometry.groups == 1 and large:
        return ConvolutionFactors(grad, x, geometry, tf32)
    by_image = geometry.per_sample_weight_gradients(grad, x, tf32=tf32)
    return Dense(by_image if len(x) == records else by_image.view(records, -1, *geometry.shape).sum(1))


def _side_by_side(images: Tensor, records: int) -> Tensor:
    """Each record's images as one: what looks at one position at a time does not tell the difference."""
    stacked: Tensor = images.unflatten(0, (records, -1)).movedim(1, 2).flatten(2, 3)
    return stacked


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
    if weights is None and not recording.of_records_and_constants(x, weight, bias):
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
        by_record: Tensor = output.unflatten(0, x.shape[:lead])
        return by_record

    return recording.run_batched(work, x)


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    return (value,) * axes if isinstance(value, int) else tuple(value)
