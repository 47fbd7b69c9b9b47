"""Layers in autograd's graph: a product's operands, cast once, and a layer's own backward pass."""

from typing import Any

from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd.function import _SingleLevelFunction, once_differentiable

from hush.core.errors import Unsupported
from hush.gradients.precision import autocast_dtype
from hush.gradients.rules import Layer


class Operands:
    """Inputs as products take them: in autocast's dtype, contiguous; the last one is kept."""

    def __init__(self) -> None:
        self._last: tuple[Tensor, int, Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        dtype = autocast_dtype(x)
        if x.dtype == dtype and x.is_contiguous():
            return x
        if x.is_inference():  # which has no version
            return x.to(dtype).contiguous()
        if self._last is not None:
            last, version, operand = self._last
            # the last one is alive, so that no other tensor can be at its address
            if last is x and version == x._version and operand.dtype == dtype:
                return operand
        operand = x.detach().to(dtype).contiguous()
        self._last = x, x._version, operand
        return operand

    def forget(self) -> None:
        """Let go of the last one."""
        self._last = None


def apply_layer(layer: Layer, anchor: Tensor, *inputs: Tensor) -> Any:
    """The layer's output; the anchor, an input that needs a gradient, makes its backward pass run."""
    if _are_functorch_transforms_active():
        raise Unsupported(
            "the model applies a torch.func transform (vmap, grad) to a layer that is trained: what the "
            "transform maps over is not the records, whose gradients are clipped one by one. Call the "
            "layer on the whole tensor, without the transform."
        )
    return _LayerFunction.apply(layer, anchor, *inputs)  # type: ignore[attr-defined]


class _LayerFunction(_SingleLevelFunction):
    """A `Layer` as an autograd function; the anchor makes sure that its backward pass runs.

    `autograd.Function` less its dispatch to transforms, which `apply_layer` has refused.
    """

    @staticmethod
    def forward(ctx: Any, layer: Layer, anchor: Tensor, *inputs: Tensor) -> Any:
        output, saved = layer.forward(*inputs)
        ctx.layer = layer
        ctx.save_for_backward(*saved)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads if len(grads) > 1 else grads[0]
        # what the tape keeps of these must not keep the graph
        saved = tuple([value.detach() for value in ctx.saved_tensors])
        return None, None, *ctx.layer.backward(grad, saved, ctx.needs_input_grad[2:])
