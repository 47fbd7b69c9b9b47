"""Per-sample gradients without `torch.vmap`, for chains of layers that cannot mix records.

A chain of torch's layers and a torch loss maps record r of the input to record r of the output, so the
model can run on the whole batch. The terms equal the terms of `Recording` (bitwise on a CPU). For small
models this is several times faster.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook

from hush.gradients.losses import CLASS_LOSSES, PerSampleLoss
from hush.gradients.rules import Layer, Weight
from hush.gradients.rules.linear import Linear, OuterFactors
from hush.gradients.rules.normalisation import GroupNorm, LayerNorm
from hush.gradients.tape import GradientTape, tape_of_uses
from hush.gradients.terms import Dense, Term
from hush.gradients.tree import Loss, call_loss

_TRAINED = frozenset({nn.Linear, nn.LayerNorm, nn.GroupNorm})
_ELEMENTWISE = frozenset(
    {
        *(nn.Identity, nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.SiLU, nn.Mish),
        *(nn.LeakyReLU, nn.Softplus, nn.Hardtanh, nn.ReLU6, nn.Hardswish),
    }
)
_LOSSES = frozenset({*CLASS_LOSSES, nn.HuberLoss, nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss})
"""Losses that use the same kernels with and without `torch.vmap`, which decomposes other losses."""


def direct_chain(model: nn.Module, loss: Loss) -> list[nn.Module] | None:
    """Layers of a sequential model, or None if the model needs `torch.vmap`.

    Only exact classes without hooks are supported, because a subclass may override forward().
    """
    criterion: Any = loss.loss if isinstance(loss, PerSampleLoss) else None
    if type(criterion) not in _LOSSES or _customised(criterion) or _has_any_global_hook():
        return None
    if any(value is not None for value in criterion._buffers.values()):
        return None
    if getattr(criterion, "label_smoothing", 0.0):
        return None
    chain: list[nn.Module] = []
    pending = [model]
    while pending:
        module = pending.pop()
        kind = type(module)
        if _customised(module):
            return None
        if kind is nn.Sequential:
            pending += reversed(module._modules.values())  # type: ignore[arg-type]
            continue
        keeps_records = not isinstance(module, nn.Flatten) or (
            module.start_dim >= 1 and module.end_dim == -1
        )
        known = kind in _TRAINED or kind in _ELEMENTWISE or kind is nn.Flatten
        if not known or not keeps_records or getattr(module, "inplace", False):
            return None
        chain.append(module)
    return chain


def runs_directly(inputs: Any) -> bool:
    """Whether a chain runs on these inputs."""
    return (
        isinstance(inputs, Tensor)
        and inputs.dim() >= 2
        and inputs.shape[0] > 0
        and not torch.is_autocast_enabled(inputs.device.type)
    )


def _customised(module: nn.Module) -> bool:
    """Whether a module has hooks or an instance-level `forward`."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def direct_tape(
    chain: list[nn.Module], loss: Loss, inputs: Tensor, targets: Any, trainable: dict[str, nn.Parameter]
) -> GradientTape:
    """Gradient tape of a chain of layers, from one forward and one backward pass."""
    records = inputs.shape[0]
    uses: dict[str, list[Term]] = {}
    lists: dict[int, list[Term]] = {}
    for name, value in trainable.items():
        uses[name] = lists[id(value)] = []
    captured: list[tuple[Any, ...]] = []
    outputs: list[Tensor] = []
    x = inputs
    with torch.enable_grad():
        for module in chain:
            if not (parameters := module._parameters):
                x = module(x)
                continue
            values = parameters["weight"], parameters["bias"]
            terms = lists.get(id(values[0])), lists.get(id(values[1]))
            x = x.contiguous()
            layer: Layer | None = None
            if type(module) is nn.Linear and x.dim() == 2:
                saved: tuple[Tensor, ...] = (x.detach(),)
                x = functional.linear(x, *values)  # type: ignore[arg-type]
            else:
                layer = _layer(
                    module,
                    records,
                    *(
                        None if value is None else Weight(value.detach(), uses)
                        for value, uses in zip(values, terms, strict=True)
                    ),
                )
                x, saved = layer.forward(x)
            if terms[0] is not None or terms[1] is not None:
                if not x.requires_grad:
                    x.requires_grad_()
                captured.append((layer, saved, terms))
                outputs.append(x)
        losses = call_loss(loss, x, targets, records)
    if outputs:
        gradients = torch.autograd.grad(losses, outputs, torch.ones_like(losses))
        for (layer, saved, terms), gradient in zip(reversed(captured), reversed(gradients), strict=True):
            if layer is not None:
                with torch.no_grad():
                    layer.backward(gradient, tuple([value.detach() for value in saved]), (False,))
                continue
            left, right = gradient.unsqueeze(1), saved[0].unsqueeze(1)
            if terms[0] is not None:
                shape = torch.Size((gradient.shape[1], saved[0].shape[1]))
                terms[0].append(OuterFactors(left, right, shape))
            if terms[1] is not None:
                terms[1].append(Dense(gradient))
    return tape_of_uses(uses, trainable, records, inputs.device)


def _layer(module: nn.Module, records: int, weight: Weight | None, bias: Weight | None) -> Layer:
    """Layer that computes a module for all records at once."""
    if isinstance(module, nn.Linear):
        assert weight is not None
        return Linear(records, weight, bias)
    if isinstance(module, nn.LayerNorm):
        return LayerNorm(tuple(module.normalized_shape), weight, bias, module.eps)
    assert isinstance(module, nn.GroupNorm)
    return GroupNorm(records, module.num_groups, weight, bias, module.eps)
