"""Convolutions in one, two and three dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from hush.gradients.convolution import ConvolutionShape, convolution_term
from hush.gradients.precision import to_autocast_dtype
from hush.gradients.terms import Dense

if TYPE_CHECKING:
    from hush.gradients.interception import Recording, Weight


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
