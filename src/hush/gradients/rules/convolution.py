"""Convolutions in one, two and three dimensions."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

from hush.gradients.capture import Weight, capture, to_autocast_dtype, unmerged
from hush.gradients.convolution import ConvolutionShape, patches
from hush.gradients.terms import Dense

if TYPE_CHECKING:
    from hush.gradients.interception import Recording


@dataclass(frozen=True, eq=False)
class Convolution:
    """A convolution of (records * count, channels, *positions)."""

    records: int
    weight: Weight
    bias: Weight | None
    geometry: ConvolutionShape

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        bias = None if self.bias is None else to_autocast_dtype(self.bias.value)
        return self.geometry.apply(x, to_autocast_dtype(self.weight.value), bias), (x,)

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        (x,) = saved
        if self.weight.terms is not None:
            self.weight.terms.append(patches(grad, x, self.geometry, self.records))
        if self.bias is not None and self.bias.terms is not None:
            each = grad.flatten(2).sum(-1)
            self.bias.terms.append(Dense(each.view(self.records, -1, each.shape[1]).sum(1)))
        return (self.geometry.back(grad, x, self.weight.value.to(x.dtype)) if needed[0] else None,)


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
    weights = recording.weights(weight, bias)
    if weights is None or weights[0] is None:
        return NotImplemented
    sizes = weight.dim() - 2
    spread = _repeated(dilation, sizes)
    around = [0] * sizes
    if padding == "same":
        needed = [d * (k - 1) for d, k in zip(spread, weight.shape[2:], strict=True)]
        around = [size // 2 for size in needed]
        uneven = [size % 2 for size in needed]
        if any(uneven):
            x = functional.pad(x, [side for size in reversed(uneven) for side in (0, size)])
    elif padding != "valid":
        around = list(_repeated(padding, sizes))
    geometry = ConvolutionShape(weight.shape, _repeated(stride, sizes), tuple(around), spread, groups)
    return recording.run_batched(partial(_at_once, weights[0], weights[1], geometry), x)


def _at_once(
    weight: Weight, bias: Weight | None, geometry: ConvolutionShape, anchor: Tensor, x: Tensor
) -> Tensor:
    lead = x.dim() - len(geometry.stride) - 1
    layer = Convolution(len(x), weight, bias, geometry)
    return unmerged(capture(layer, anchor, to_autocast_dtype(x).flatten(0, lead - 1)), x.shape[:lead])


def _repeated(value: Any, sizes: int) -> tuple[int, ...]:
    return (value,) * sizes if isinstance(value, int) else tuple(value)
