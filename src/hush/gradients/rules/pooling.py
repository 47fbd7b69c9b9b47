"""Max pooling on a CPU with channels last: torch's kernel for that order takes half the time at most."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._C._functorch import is_batchedtensor
from torch.nn import functional

if TYPE_CHECKING:
    from hush.gradients.recording import Recording

_CHANNELS = 4
"""Channels from which on the changes of order take less time than they save."""


@dataclass(frozen=True, eq=False)
class MaxPool:
    """Max pooling of (images, channels, height, width): the numbers of torch's kernel for that order."""

    kernel_size: int | Sequence[int]
    stride: int | Sequence[int]
    padding: int | Sequence[int]
    dilation: int | Sequence[int]
    ceil_mode: bool

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        images = x.contiguous(memory_format=torch.channels_last)
        output, indices = functional.max_pool2d_with_indices(images, **vars(self))
        # what follows and precedes works on channels first
        return output.contiguous(), (x, indices.contiguous())

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        if not needed[0]:
            return (None,)
        x, indices = saved
        sizes = (_pair(value) for value in (self.kernel_size, self.stride, self.padding, self.dilation))
        gradient: Tensor = torch.ops.aten.max_pool2d_with_indices_backward(
            grad.contiguous(), x.contiguous(), *sizes, self.ceil_mode, indices
        )
        return (gradient,)


def max_pool2d(
    recording: "Recording",
    x: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """The rule for `F.max_pool2d`."""
    few = x.dim() != 4 or x.shape[1] < _CHANNELS
    if x.is_cuda or not is_batchedtensor(x) or few or return_indices:
        return NotImplemented
    layer = MaxPool(kernel_size, kernel_size if stride is None else stride, padding, dilation, ceil_mode)

    def work(x: Tensor) -> Tensor:
        output: Tensor = recording.capture(layer, x.flatten(0, 1)).unflatten(0, x.shape[:2])
        return output

    return recording.run_batched(work, x)


def _pair(value: int | Sequence[int]) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)
