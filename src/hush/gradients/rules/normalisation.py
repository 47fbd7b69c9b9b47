"""Normalisation within a record, with a trained scale and shift."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from hush.gradients.products import uses_kernels
from hush.gradients.terms import Dense

if TYPE_CHECKING:
    from hush.gradients.forward.interception import Recording
    from hush.gradients.rules import Weight

_Backward = tuple[Tensor | None, ...]


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
            x, self.shape, _value(self.weight), _value(self.bias), self.eps
        )
        return output, (x, mean, scale)

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]) -> _Backward:
        x, mean, scale = saved
        _append((self.weight, self.bias), self._sums(grad, x, mean, scale))
        inputs: Tensor | None = None
        if needed[0]:
            inputs = torch.ops.aten.native_layer_norm_backward.default(
                grad, x, self.shape, mean, scale, _value(self.weight), None, [True, False, False]
            )[0]
        return (inputs,)

    def _sums(self, grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor) -> Sequence[Tensor]:
        """The per-sample gradients of scale and shift: (records, *shape) each."""
        records = len(x)
        if uses_kernels(x):
            from hush.gradients.kernels.normalisation_kernel import column_gradients

            rows = records, -1, math.prod(self.shape)
            sums = column_gradients(grad.contiguous().view(rows), x.view(rows), mean, scale)
            return [part.view(records, *self.shape) for part in sums]
        product = torch.addcmul(mean * -scale, x, scale).mul_(grad)
        return [part.reshape(records, -1, *self.shape).sum(1) for part in (product, grad)]


@dataclass(frozen=True, eq=False)
class GroupNorm:
    """Normalisation over groups of channels of (records * count, channels, *positions)."""

    records: int
    groups: int
    weight: "Weight | None"
    bias: "Weight | None"
    eps: float

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        output, mean, scale = torch.native_group_norm(
            _float(x), _value(self.weight), _value(self.bias), *_sizes(x), self.groups, self.eps
        )
        return output, (x, mean, scale)  # the input as it came: in half precision half as large

    def backward(self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]) -> _Backward:
        x, mean, scale = saved
        grad = grad.contiguous()
        if self.weight is not None and uses_kernels(x):
            from hush.gradients.kernels.normalisation_kernel import channel_gradients, input_gradient

            by_channel = channel_gradients(grad, x, mean, scale, self.groups)
            self._append(by_channel)
            if not needed[0]:
                return (None,)
            value = self.weight.value
            return (input_gradient(grad, x, mean, scale, value, by_channel, self.groups),)
        given, x = x.dtype, x.to(grad.dtype)
        images, channels, positions = _sizes(x)
        shift = grad.view(images, self.groups, -1, positions).sum(-1)
        flat = (images * channels, 1, positions)
        product = torch.bmm(grad.view(flat), x.view(flat).mT).view_as(shift)
        by_image = (product - shift * mean.unsqueeze(-1)) * scale.unsqueeze(-1)
        self._append([by_image.flatten(1), shift.flatten(1)])
        inputs: Tensor | None = None
        if needed[0]:
            inputs = torch.ops.aten.native_group_norm_backward.default(
                grad, x, mean, scale, _value(self.weight), *_sizes(x), self.groups, [True, False, False]
            )[0].to(given)
        return (inputs,)

    def _append(self, by_image: Iterable[Tensor]) -> None:
        """The gradients of scale and shift, (images, channels) each, to the terms of those trained."""
        by_record = [part.view(self.records, -1, part.shape[1]).sum(1) for part in by_image]
        _append((self.weight, self.bias), by_record)


def layer_norm(
    recording: "Recording",
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """The rule for `F.layer_norm`."""
    weights = recording.as_weights(weight, bias)
    if weights is None:
        if not recording.of_records_and_constants(x, weight, bias):
            return NotImplemented
        shape = list(normalized_shape)
        return recording.run_batched(lambda x: functional.layer_norm(x, shape, weight, bias, eps), x)
    layer = LayerNorm(tuple(normalized_shape), weights[0], weights[1], eps)
    return recording.run_batched(partial(recording.capture, layer), x)


def group_norm(
    recording: "Recording",
    x: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    """The rule for `F.group_norm`."""
    weights = recording.as_weights(weight, bias)
    if weights is None:
        return NotImplemented
    layer = GroupNorm(recording.records, num_groups, weights[0], weights[1], eps)

    def work(x: Tensor) -> Tensor:
        images = x.flatten(0, 1).contiguous()
        output: Tensor = recording.capture(layer, images).unflatten(0, x.shape[:2])
        return output

    return recording.run_batched(work, x)


def instance_norm(
    recording: "Recording",
    x: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """The rule for `F.instance_norm`: a group norm with a group for each channel."""
    if running_mean is not None or not use_input_stats:
        return NotImplemented
    return group_norm(recording, x, x.shape[1], weight, bias, eps)


def rms_norm(
    recording: "Recording",
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """The rule for `F.rms_norm`: normalise, then scale with a per-sample copy of the weight."""
    if weight is None:
        return NotImplemented
    with recording:
        return functional.rms_norm(x, normalized_shape, None, eps) * weight


def _append(weights: Iterable["Weight | None"], gradients: Iterable[Tensor]) -> None:
    """Per-sample gradients to the terms of the weights that are trained."""
    for weight, gradient in zip(weights, gradients, strict=True):
        if weight is not None and weight.terms is not None:
            weight.terms.append(Dense(gradient))


def _float(x: Tensor) -> Tensor:
    """Autocast normalises in single precision."""
    return x.float() if torch.is_autocast_enabled(x.device.type) else x


def _value(weight: "Weight | None") -> Tensor | None:
    return None if weight is None else weight.value


def _sizes(x: Tensor) -> tuple[int, int, int]:
    return len(x), x.shape[1], math.prod(x.shape[2:])
