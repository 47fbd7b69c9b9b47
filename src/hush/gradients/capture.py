"""One layer, for all records at once: what it computes and what it leaves on the tape."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from hush.gradients.terms import Term


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter's value, and where its per-example gradients go (None: it is not trained)."""

    value: Tensor
    terms: list[Term] | None = None


class Layer(Protocol):
    """A layer that works out its own backward pass, without the gradient of its weights."""

    @property
    def forward(self) -> Callable[..., tuple[Tensor, tuple[Tensor, ...]]]:
        """From the inputs: the output, no view of an input, and what the backward pass needs."""

    def backward(
        self, grad: Tensor, saved: tuple[Tensor, ...], needed: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        """Leave the terms of the weights' gradients, and return the gradients of the inputs."""


class _Captured(Function):
    @staticmethod
    def forward(ctx: Any, layer: Layer, anchor: Tensor, *inputs: Tensor) -> Tensor:
        output, saved = layer.forward(*inputs)
        ctx.layer = layer
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.layer.backward(grad, ctx.saved_tensors, ctx.needs_input_grad[2:])


def capture(layer: Layer, anchor: Tensor, *inputs: Tensor) -> Tensor:
    """The layer's output; the anchor makes sure that its backward pass runs."""
    output: Tensor = _Captured.apply(layer, anchor, *inputs)  # type: ignore[no-untyped-call]
    return output


def unmerged(values: Tensor, sizes: Sequence[int]) -> Tensor:
    """The values with their first dimension taken apart into these."""
    return values.view(*sizes, *values.shape[1:])


def to_autocast_dtype(values: Tensor) -> Tensor:
    """The values in the type in which autocast multiplies matrices, where it is on."""
    kind = values.device.type
    if torch.is_autocast_enabled(kind) and values.dtype in _LOWERED:
        return values.to(torch.get_autocast_dtype(kind))
    return values


_LOWERED = (torch.float32, torch.float16, torch.bfloat16)
