"""Per-sample gradients of models whose layers cannot mix records, without `torch.vmap`.

A chain of stock layers and a stock loss maps record r of its input to record r of its output, whatever
the values are. Such a model runs on the whole batch, and the layers' own `Layer` classes (`rules`) make
the terms: the numbers are those of `Recording`, bit for bit, in a fraction of the time for small models.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from hush.gradients.losses import CLASS_LOSSES, PerSampleLoss
from hush.gradients.rules import Layer, Weight
from hush.gradients.rules.linear import Linear
from hush.gradients.rules.normalisation import GroupNorm, LayerNorm
from hush.gradients.terms import Term
from hush.gradients.tree import Loss, call_loss

_TRAINED = frozenset({nn.Linear, nn.LayerNorm, nn.GroupNorm})
_ELEMENTWISE = frozenset(
    {
        *(nn.Identity, nn.ReLU, nn.GELU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.SiLU, nn.Mish),
        *(nn.LeakyReLU, nn.Softplus, nn.Hardtanh, nn.ReLU6, nn.Hardswish),
    }
)
_LOSSES = frozenset({*CLASS_LOSSES, nn.HuberLoss, nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss})
"""Losses of the same kernels under `torch.vmap`, which takes the others apart."""


def direct_chain(model: nn.Module, loss: Loss, inputs: Any) -> list[nn.Module] | None:
    """The layers that a model applies one after another; None if it needs `torch.vmap`.

    Only exact classes count, without hooks: a subclass may do anything. The CPU's kernels alone are
    known to give the same bits for a batch as under `torch.vmap`.
    """
    if not isinstance(inputs, Tensor) or inputs.dim() < 2 or inputs.device.type != "cpu":
        return None
    if not isinstance(loss, PerSampleLoss) or _has_any_global_hook():
        return None
    criterion = loss.loss
    if (
        type(criterion) not in _LOSSES
        or _customised(criterion)
        or any(v is not None for v in criterion._buffers.values())
    ):
        return None
    if getattr(criterion, "label_smoothing", 0.0) or torch.is_autocast_enabled("cpu"):
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
        elif kind in _TRAINED or kind in _ELEMENTWISE or kind is nn.Flatten:
            if getattr(module, "inplace", False) or not _keeps_records(module):
                return None
            chain.append(module)
        else:
            return None
    return chain


def _keeps_records(module: nn.Module) -> bool:
    """Whether the first dimension of a layer's output is that of its input."""
    return not isinstance(module, nn.Flatten) or (module.start_dim >= 1 and module.end_dim == -1)


def _customised(module: nn.Module) -> bool:
    """Whether a module does something besides the `forward` of its class."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def record_directly(
    chain: list[nn.Module],
    loss: Loss,
    inputs: Tensor,
    targets: Any,
    trainable: dict[str, nn.Parameter],
) -> dict[str, list[Term]]:
    """The terms of every parameter, one for each use, from one forward and one backward pass."""
    records = len(inputs)
    terms: dict[str, list[Term]] = {name: [] for name in trainable}
    lists = {id(value): terms[name] for name, value in trainable.items()}
    captured: list[tuple[Layer, tuple[Tensor, ...]]] = []
    outputs: list[Tensor] = []
    x = inputs
    for module in chain:
        parameters = module._parameters
        if not parameters:
            x = module(x)
            continue
        weights: list[Weight | None] = []
        trained = False
        for value in (parameters["weight"], parameters["bias"]):
            trained = trained or id(value) in lists
            weights.append(None if value is None else Weight(value.detach(), lists.get(id(value))))
        layer = _layer(module, records, *weights)
        x, saved = layer.forward(x.contiguous())
        if trained:
            if not x.requires_grad:
                x.requires_grad_()
            captured.append((layer, saved))
            outputs.append(x)
    losses = call_loss(loss, x, targets, records)
    if outputs:
        gradients = torch.autograd.grad(losses.sum(), outputs)
        with torch.no_grad():
            for (layer, saved), gradient in zip(reversed(captured), reversed(gradients), strict=True):
                layer.backward(gradient, tuple([value.detach() for value in saved]), (False,))
    return terms


def _layer(module: nn.Module, records: int, weight: Weight | None, bias: Weight | None) -> Layer:
    """The layer of a module, which computes all records at once."""
    if isinstance(module, nn.Linear):
        assert weight is not None
        return Linear(records, weight, bias)
    if isinstance(module, nn.LayerNorm):
        return LayerNorm(tuple(module.normalized_shape), weight, bias, module.eps)
    assert isinstance(module, nn.GroupNorm)
    return GroupNorm(records, module.num_groups, weight, bias, module.eps)
