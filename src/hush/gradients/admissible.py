"""Which models, losses and optimizers a private step can work with, and why not the others."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import Unsupported
from hush.gradients.recording import Loss


def check_model(model: nn.Module) -> None:
    """Raise for a module that mixes records or keeps what it saw of them."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
            module.training or not module.track_running_stats
        ):
            raise Unsupported(
                f"{name or 'the model'} is a {kind} in training mode: it mixes the records of a batch, "
                "so clipping one record's gradient does not bound its influence. Use "
                "torch.nn.GroupNorm, or freeze it with .eval()."
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and (
            module.track_running_stats and module.training
        ):
            raise Unsupported(
                f"{name or 'the model'} is a {kind} with track_running_stats=True: its running "
                "statistics leave the room without noise. Pass track_running_stats=False."
            )
    hooked = [value for value in model.parameters() if value._backward_hooks]
    if hooked or any(m._backward_hooks or m._backward_pre_hooks for m in model.modules()):
        raise Unsupported(
            "the model has backward hooks, which would have to change each record's gradient before it "
            "is clipped and are not run there. Remove them, or do their work in forward()."
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.is_complex():
            raise Unsupported(
                f"{name} holds complex numbers: clipping and noise are charged for real ones, and "
                "complex noise is smaller in each part. Keep the two parts as one real parameter and "
                "use torch.view_as_complex in forward()."
            )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise Unsupported(
            "the model has no parameter that requires a gradient: there is nothing to train. "
            "Unfreeze some with requires_grad_(True)."
        )


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise for an optimizer that would move something the private gradient does not cover."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported(
            "LBFGS evaluates the loss several times a step, and only one evaluation is charged. Use "
            "torch.optim.SGD or Adam."
        )
    covered = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # An optimizer skips what has no gradient, so frozen parameters do no harm while they have none.
    strangers = [
        tuple(parameter.shape)
        for parameter in held
        if id(parameter) not in covered and (parameter.requires_grad or parameter.grad is not None)
    ]
    if strangers:
        raise Unsupported(
            f"the optimizer holds {len(strangers)} parameter(s) that are not trainable parameters of "
            f"the model (shapes {strangers[:3]}): they would move without a private gradient. Build it "
            "from model.parameters(), and clear gradients of frozen ones with zero_grad()."
        )
    idle = covered - {id(parameter) for parameter in held}
    if idle:
        names = [name for name, parameter in model.named_parameters() if id(parameter) in idle]
        raise Unsupported(
            f"the optimizer does not hold {', '.join(names[:3])}: such parameters would use up the "
            "clipping norm and never move. Give them to it, or freeze them with requires_grad_(False)."
        )


def per_record(loss: Any) -> Loss:
    """The loss with one value per record; a loss module that says how it reduces is undone."""
    if not callable(loss):
        raise Unsupported(
            f"loss={loss!r} cannot be called: it is to give one value for each record of a batch. Pass "
            "e.g. torch.nn.CrossEntropyLoss()."
        )
    reduction = getattr(loss, "reduction", "none")
    if reduction == "none":
        return loss  # type: ignore[no-any-return]
    each = copy.copy(loss)
    each.reduction = "none"

    def reduced_within(outputs: Tensor, targets: Tensor) -> Tensor:
        values: Tensor = each(outputs, targets)
        within = values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)
        return within.mean(1) if reduction == "mean" else within.sum(1)

    return reduced_within
