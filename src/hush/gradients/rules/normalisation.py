"""Rules for normalisation layers with trained scale and shift."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hush.gradients.products import uses_kernels
from hush.gradients.terms import Dense
from hush.gradients.tree import Gradients

if TYPE_CHECKING:
    from hush.gradients.recording import Recording
    from hush.gradients.rules import Weight


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Normalisation over the last dimensions."""

    shape: tuple[int, ...]
    weight: "Weight | None"
    bias: "Weight | None"
    eps: float

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = _float(x).contiguous()
        output, mean, scale = torch.native_layer_norm(
            x, self.shape, _value(self.weight, x), _value(self.bias, x), self.eps
        )
        return output, (x, mean, scale)

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]) -> Gradients:
        x, mean, scale = saved
        rows = len(x), -1, math.prod(self.shape)
        if uses_kernels(x):
            from hush.gradients.kernels.normalisation_kernel import column_gradients

            flat = column_gradients(grad.contiguous().view(rows), x.view(rows), mean, scale)
        else:
            product = torch.addcmul(mean * -scale, x, scale).mul_(grad)
            flat = torch.stack([part.reshape(rows).sum(1) for part in (product, grad)])
        _append((self.weight, self.bias), flat.unflatten(2, self.shape))
        inputs: Tensor | None = None
        if needed[0]:
            inputs = torch.ops.aten.native_layer_norm_backward.default(
                grad, x, self.shape, mean, scale, _value(self.weight, x), None, [True, False, False]
            )[0]
        return (inputs,)


@dataclass(frozen=True, eq=False)
class GroupNorm:
    """Normalisation over groups of channels, for inputs (records * count, channels, *positions)."""

    records: int
    groups: int
    weight: "Weight | None"
    bias: "Weight | None"
    eps: float

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        wide = _float(x)
        output, mean, scale = torch.native_group_norm(
            wide, _value(self.weight, wide), _value(self.bias, wide), *_sizes(x), self.groups, self.eps
        )
        return output, (x, mean, scale)  # save the original input, which may be in half precision

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]) -> Gradients:
        x, mean, scale = saved
        grad = grad.contiguous()
        by_image = self._sums(grad, x, mean, scale)
        by_record = by_image.unflatten(1, (self.records, len(x) // max(self.records, 1))).sum(2)
        _append((self.weight, self.bias), by_record)
        if not needed[0]:
            return (None,)
        if self.weight is not None and uses_kernels(x):
            from hush.gradients.kernels.normalisation_kernel import input_gradient

            value = self.weight.value
            return (input_gradient(grad, x, mean, scale, value, by_image, self.groups),)
        sizes, wide = _sizes(x), x.to(grad.dtype)
        weight = _value(self.weight, wide)
        inputs: Tensor = torch.ops.aten.native_group_norm_backward.default(
            grad, wide, mean, scale, weight, *sizes, self.groups, [True, False, False]
        )[0]
        return (inputs.to(x.dtype),)

    def _sums(self, grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
        """Gradients of scale and shift per image: (2, images, channels)."""
        if not x.numel():  # mean and scale are NaN without positions
            return mean.new_zeros(2, *x.shape[:2])
        if uses_kernels(x):
            from hush.gradients.kernels.normalisation_kernel import channel_gradients

            return channel_gradients(grad, x, mean, scale, self.groups)
        wide = torch.promote_types(grad.dtype, mean.dtype)
        images, channels, positions = _sizes(x)
        shape = images, self.groups, channels // self.groups, positions
        grad, x = (part.to(wide).view(shape) for part in (grad, x))
        # centre first, because a large mean would cause cancellation
        centred = (x - mean.view(images, self.groups, 1, 1)).mul_(grad)
        by_image = centred.sum(-1) * scale.unsqueeze(-1)
        return torch.stack([by_image.flatten(1), grad.sum(-1).flatten(1)])


def layer_norm(
    recording: "Recording",
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Rule for `F.layer_norm`."""
    weights, shape = recording.as_weights(weight, bias), tuple(normalized_shape)
    if weights is not None:
        layer = LayerNorm(shape, weights[0], weights[1], eps)
        return recording.run_batched(partial(recording.capture, layer), x)
    if not recording.of_records_and_constants(x, weight, bias):
        return NotImplemented
    return recording.run_batched(lambda x: functional.layer_norm(x, shape, weight, bias, eps), x)


def _on_images(recording: "Recording", work: Callable[[Tensor], Tensor], x: Tensor) -> Any:
    """Apply `work` to the concatenated images of all records."""
    return recording.run_batched(
        lambda x: work(x.flatten(0, 1).contiguous()).unflatten(0, x.shape[:2]), x
    )


def group_norm(
    recording: "Recording",
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """Rule for `F.group_norm`."""
    weights = recording.as_weights(weight, bias)
    if weights is not None:
        layer = GroupNorm(recording.records, num_groups, weights[0], weights[1], eps)
        return _on_images(recording, partial(recording.capture, layer), x)
    if not recording.of_records_and_constants(x, weight, bias):
        return NotImplemented
    return _on_images(recording, lambda x: functional.group_norm(x, num_groups, weight, bias, eps), x)


def batch_norm(
    recording: "Recording",
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Rule for `F.batch_norm` in evaluation mode, which uses fixed statistics."""
    if training or running_mean is None or running_var is None:
        return NotImplemented
    mean, variance = running_mean, running_var
    if weight is not None and recording.as_weights(weight, bias) is not None:
        shape = (-1, *[1] * (x.dim() - 2))
        with recording:  # scale and shift are per-sample copies
            output = functional.batch_norm(x, mean, variance, eps=eps) * weight.view(shape)
            return output if bias is None else output + bias.view(shape)
    if not recording.of_records_and_constants(x, mean, variance, weight, bias):
        return NotImplemented
    return _on_images(
        recording, lambda x: functional.batch_norm(x, mean, variance, weight, bias, eps=eps), x
    )


def rms_norm(
    recording: "Recording",
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Rule for `F.rms_norm`: normalise, then scale with a per-sample copy of the weight."""
    if weight is None:
        return NotImplemented
    with recording:
        return functional.rms_norm(x, normalized_shape, None, eps) * weight


def _append(weights: Iterable["Weight | None"], gradients: Iterable[Tensor]) -> None:
    """Append per-sample gradients to the terms of the trained weights."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if weight is not None and weight.terms is not None:
            weight.terms.append(Dense(gradient))


def _float(x: Tensor) -> Tensor:
    """Cast to single precision under autocast, as torch does."""
    return x.float() if torch.is_autocast_enabled(x.device.type) else x


def _value(weight: "Weight | None", x: Tensor) -> Tensor | None:
    """Value of a scale or shift, in single precision under autocast."""
    if weight is None:
        return None
    half = weight.value.dtype in (torch.bfloat16, torch.float16)
    return weight.value.float() if half and x.dtype == torch.float32 else weight.value


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return len(x), x.shape[1], math.prod(x.shape[2:])
