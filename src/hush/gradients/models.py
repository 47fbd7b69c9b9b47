"""Models and optimizers that a private step supports, and why not the others."""

import math
from functools import lru_cache

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hush.core.errors import InvalidValue, Unsupported
from hush.core.value import with_article


class ModuleTree:
    """Names of a model's modules and parameters, walked anew at each call."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def modules(self) -> dict[str, nn.Module]:
        """All modules by name, the model first."""
        return dict(self.model.named_modules())

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by name, each once."""
        return dict(self.model.named_parameters())

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that require a gradient now, by name."""
        return {name: value for name, value in self.parameters().items() if value.requires_grad}


_DISTRIBUTED = {
    "DataParallel",
    "DistributedDataParallel",
    "FullyShardedDataParallel",
    "FSDPModule",
}
"""Wrappers by their names: importing them all costs more than the step."""


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module of the model."""
    return any(_distributed_wrapper(type(module)) == "FSDPModule" for module in model.modules())


def check_model(tree: ModuleTree, *, sharded: bool = False) -> None:
    """Raise for a module that mixes records or keeps state of them.

    Args:
        tree: of the model as it will be trained, in training mode.
        sharded: whether the step provides for `fully_shard`.
    """
    modules, parameters = tree.modules(), tree.parameters()
    for name, module in modules.items():
        _check_layer(name, module, sharded=sharded)
    lazy = [name for name, value in parameters.items() if is_lazy(value)]
    if lazy:
        raise Unsupported(
            f"{lazy[0]} has no shape yet (a Lazy module): what is trained, and how much noise that "
            "takes, is not known. Run the model once on public or made-up inputs before making the "
            "optimizer and the step."
        )
    hooked = any(value._backward_hooks for value in parameters.values())
    if hooked or any(m._backward_hooks or m._backward_pre_hooks for m in modules.values()):
        raise Unsupported(
            "the model has backward hooks, which would have to change each record's gradient before it "
            "is clipped and are not run there. Remove them, or do their work in forward()."
        )
    if any(value._post_accumulate_grad_hooks for value in parameters.values()):
        raise Unsupported(
            "the model has hooks of register_post_accumulate_grad_hook, which run when autograd has "
            "accumulated a gradient: the private gradient is set, not accumulated, so they would never "
            "run. Remove them, and do their work after the step."
        )
    trained = {name: value for name, value in parameters.items() if value.requires_grad}
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise Unsupported(
                f"{name} holds complex numbers: clipping and noise are charged for real ones, and "
                "complex noise is smaller in each part. Keep the two parts as one real parameter and "
                "use torch.view_as_complex in forward()."
            )
    if not trained:
        raise Unsupported(
            "the model has no parameter that requires a gradient: there is nothing to train. "
            "Unfreeze some with requires_grad_(True)."
        )


def check_materialized(model: nn.Module) -> None:
    """Raise for a model with parameters or buffers on the meta device.

    Args:
        model: as it is passed to a step; that a value has memory does not change between steps.
    """
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        if value.is_meta:
            raise Unsupported(
                f"{name} is on the meta device: it has a shape and no numbers, so that there is nothing "
                "to train and nothing to add noise to. Build the model outside of torch.device('meta'), "
                "as from_pretrained does, before making the optimizer and the step. (to_empty and "
                "load_state_dict leave buffers that are not in the state_dict as they find them in "
                "memory: set these as well.)"
            )


def _check_layer(name: str, module: nn.Module, *, sharded: bool) -> None:
    """Raise for a layer that mixes records, keeps state of them or shows which rows they use."""
    wrapper = _distributed_wrapper(type(module))
    if wrapper == "FSDPModule" and not sharded:
        raise Unsupported(
            f"{_layer(name)} has fully_shard applied to it and the step runs in one process: it would "
            "charge and add noise for a model of which it holds a part. Let PrivateStep run on all "
            "ranks that the model is sharded over: leave out processes."
        )
    if wrapper not in (None, "FSDPModule"):
        raise Unsupported(
            f"{_layer(name)} is wrapped in {wrapper}, which averages gradients over processes or "
            "devices before they are clipped: no bound on one record's influence would hold. Pass the "
            "plain module (model.module): inside a process group PrivateStep adds up the clipped sums "
            "of all ranks by itself."
        )
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
        module.training or not module.track_running_stats
    ):
        raise Unsupported(
            f"{_described(name, module)} in training mode: it mixes the records of a batch, "
            "so clipping one record's gradient does not bound its influence. Use "
            "torch.nn.GroupNorm, or freeze it with .eval()."
        )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and (
        module.track_running_stats and module.training
    ):
        raise Unsupported(
            f"{_described(name, module)} with track_running_stats=True: its running "
            "statistics are released without noise. Pass track_running_stats=False."
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        raise Unsupported(
            f"{_described(name, module)} with max_norm: it rescales the rows that a batch "
            "uses, trained or frozen, so the weights show which rows those were. Leave max_norm out."
        )


@lru_cache
def _distributed_wrapper(kind: type) -> str | None:
    """Name of the wrapper of several processes that a class of modules is."""
    return next((base.__name__ for base in kind.__mro__ if base.__name__ in _DISTRIBUTED), None)


def _layer(name: str) -> str:
    return f"layer {name!r}" if name else "the model"


def _described(name: str, module: nn.Module) -> str:
    return f"{_layer(name)} is {with_article(type(module).__name__)}"


def check_optimizer(optimizer: torch.optim.Optimizer, tree: ModuleTree) -> None:
    """Raise for an optimizer that would update something the private gradient does not cover.

    Args:
        optimizer: built from the model's parameters.
        tree: of the trained model.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported(
            "LBFGS evaluates the loss several times a step, and only one evaluation is charged. Use "
            "torch.optim.SGD or Adam."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Unsupported(
            "SparseAdam moves only the rows that have a gradient, and which ones those are is private: "
            "noise is added to all of them. Use torch.optim.Adam."
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise Unsupported(
            "the optimizer has differentiable=True: its steps would be recorded for a gradient through "
            "them, which would be one of the records without noise. Leave it out."
        )
    rates = [group.get("lr") for group in optimizer.param_groups]
    if not all(math.isfinite(rate) for rate in rates if isinstance(rate, float)):  # a tensor may wait
        raise InvalidValue(
            f"the optimizer's learning rates are {rates}, and must be finite: a step would be charged, "
            "and leave weights that are not numbers. Pass e.g. lr=0.1, or mend their schedule."
        )
    if _has_scaler(optimizer):
        raise Unsupported(
            f"the optimizer is {with_article(type(optimizer).__name__)} with a gradient scaler, which "
            "divides what it is given by the factor that it multiplied a loss by: it multiplied none "
            "here, and the private gradient would be thousands of times too small. Use mixed precision "
            "with bfloat16 (bf16), which needs no scaler, or pass the optimizer that was wrapped."
        )
    names = {id(parameter): name for name, parameter in tree.trainable().items()}
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # An optimizer skips what has no gradient, so frozen parameters do no harm while they have none.
    uncovered = [
        tuple(parameter.shape)
        for parameter in optimized
        if id(parameter) not in names and (parameter.requires_grad or parameter.grad is not None)
    ]
    if uncovered:
        raise Unsupported(
            f"the optimizer holds {len(uncovered)} parameter(s) that are not trainable parameters of "
            f"the model (shapes {uncovered[:3]}): they would move without a private gradient. Build it "
            "from model.parameters(), after fully_shard where that is used, and clear gradients of "
            "frozen ones with zero_grad()."
        )
    held = set(map(id, optimized))
    missing = [name for identity, name in names.items() if identity not in held]
    if missing:
        raise Unsupported(
            f"the optimizer does not hold {', '.join(missing[:3])}: such parameters would use up the "
            "clipping norm and never move. Give them to it, or freeze them with requires_grad_(False)."
        )


def _has_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps of an optimizer that Accelerate or Lightning has wrapped go through a GradScaler."""
    plugin = getattr(getattr(optimizer, "_strategy", None), "precision_plugin", None)
    return any(getattr(owner, "scaler", None) is not None for owner in (optimizer, plugin))
