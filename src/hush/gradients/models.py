"""Models and optimizers that a private step supports, and why not the others."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hush.core.errors import Unsupported
from hush.core.value import with_article


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require a gradient now, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


class WholeModules:
    """Modules whose parameters are all in this process; `sharding.ShardedModules` has the others."""

    sharded = False

    def trainable(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Parameters of forward passes that require a gradient now, by name."""
        return trainable(model)

    def gathering(self) -> AbstractContextManager[None]:
        """Context that gathers modules one by one, in forward and backward passes."""
        return nullcontext()

    def shards(self, names: Iterable[str]) -> list[nn.Parameter]:
        """This rank's shards of the parameters of these names; none if they are whole."""
        return []


WHOLE = WholeModules()


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module of the model."""
    return any(_distributed_wrapper(type(module)) == "FSDPModule" for module in model.modules())


def check_model(model: nn.Module, *, sharded: bool = False) -> None:
    """Raise for a module that mixes records or keeps state of them."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name, module in modules.items():
        _check_layer(name, module, sharded=sharded)
    if lazy := [name for name, value in parameters.items() if is_lazy(value)]:
        raise Unsupported(
            f"{lazy[0]} has no shape yet (a Lazy module). Run the model once on public or synthetic "
            "inputs before making the optimizer and the step."
        )
    hooked = any(value._backward_hooks for value in parameters.values())
    if hooked or any(m._backward_hooks or m._backward_pre_hooks for m in modules.values()):
        raise Unsupported(
            "the model has backward hooks, which are not run on per-sample gradients. Remove them, or "
            "do their work in forward()."
        )
    if any(value._post_accumulate_grad_hooks for value in parameters.values()):
        raise Unsupported(
            "the model has hooks of register_post_accumulate_grad_hook, which never run: the private "
            "gradient is set, not accumulated. Remove them, and do their work after the step."
        )
    trained = trainable(model)
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise Unsupported(
                f"{name} holds complex numbers, and complex noise is smaller in each part than the "
                "charged noise. Keep a real parameter, and use torch.view_as_complex in forward()."
            )
    if not trained:
        raise Unsupported(
            "the model has no parameter that requires a gradient: there is nothing to train. "
            "Unfreeze some with requires_grad_(True)."
        )


def _check_layer(name: str, module: nn.Module, *, sharded: bool) -> None:
    """Raise for a layer that mixes records, keeps state of them or shows which rows they use."""
    layer = f"layer {name!r}" if name else "the model"
    described = f"{layer} is {with_article(type(module).__name__)}"
    wrapper = _distributed_wrapper(type(module))
    if wrapper == "FSDPModule" and not sharded:
        raise Unsupported(
            f"{layer} has fully_shard applied to it and the step runs in one process, which "
            "holds a part of the model. Run PrivateStep on all ranks of the model: leave out processes."
        )
    if wrapper not in (None, "FSDPModule"):
        raise Unsupported(
            f"{layer} is wrapped in {wrapper}, which averages gradients over processes or "
            "devices before they are clipped. Pass the plain module (model.module): PrivateStep adds up "
            "the clipped sums of all ranks."
        )
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
        module.training or not module.track_running_stats
    ):
        raise Unsupported(
            f"{described} in training mode: it mixes the records of a batch, "
            "so clipping one record's gradient does not bound its influence. Use "
            "torch.nn.GroupNorm, or freeze it with .eval()."
        )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and (
        module.track_running_stats and module.training
    ):
        raise Unsupported(
            f"{described} with track_running_stats=True: its running "
            "statistics are released without noise. Pass track_running_stats=False."
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        raise Unsupported(
            f"{described} with max_norm: it rescales the rows that a batch "
            "uses, trained or frozen, so the weights show which rows those were. Leave max_norm out."
        )


def _distributed_wrapper(kind: type) -> str | None:
    """Name of the wrapper of several processes that a class is: importing them all takes long."""
    wrappers = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    return next((base.__name__ for base in kind.__mro__ if base.__name__ in wrappers), None)


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise for an optimizer that would update something the private gradient does not cover."""
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
    # Accelerate keeps it on the optimizer, Lightning on the strategy of the optimizer that it wraps
    plugin = getattr(getattr(optimizer, "_strategy", None), "precision_plugin", None)
    if any(getattr(owner, "scaler", None) is not None for owner in (optimizer, plugin)):
        raise Unsupported(
            f"the optimizer is {with_article(type(optimizer).__name__)} with a gradient scaler, which "
            "would divide the private gradient by a factor that no loss was multiplied by. Use bfloat16 "
            "(bf16), which needs no scaler, or pass the optimizer that was wrapped."
        )
    names = {id(parameter): name for name, parameter in trainable(model).items()}
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # An optimizer skips what has no gradient, so frozen parameters do no harm while they have none.
    uncovered = [
        parameter
        for parameter in optimized
        if id(parameter) not in names and (parameter.requires_grad or parameter.grad is not None)
    ]
    if uncovered:
        cause, way_out = "holds frozen parameters that have a gradient", "Call optimizer.zero_grad()."
        if not set(map(id, uncovered)) <= set(map(id, model.parameters())):
            cause = "was built from another model, or before this one changed (a new layer, fully_shard)"
            way_out = "Build it from model.parameters()."
        shapes = ", ".join(str(tuple(parameter.shape)) for parameter in uncovered[:3])
        raise Unsupported(
            f"the optimizer {cause}: {len(uncovered)} of its parameters (shapes {shapes}"
            f"{', ...' * (len(uncovered) > 3)}) would move without a private gradient. {way_out}"
        )
    held = set(map(id, optimized))
    missing = [name for identity, name in names.items() if identity not in held]
    if missing:
        raise Unsupported(
            f"the optimizer does not hold {', '.join(missing[:3])}: such parameters would use up the "
            "clipping norm and never move. Give them to it, or freeze them with requires_grad_(False)."
        )
