"""Checks of models and optimizers before private training."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hush.core.errors import Unsupported
from hush.core.value import with_article


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by name."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}


class WholeModules:
    """Access to unsharded parameters; see `sharding.ShardedModules` for sharded parameters."""

    sharded = False

    def trainable(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Trainable parameters that forward passes use, by name."""
        return trainable(model)

    def gathering(self) -> AbstractContextManager[None]:
        """Context for forward and backward passes; does nothing without sharding."""
        return nullcontext()

    def shards(self, names: Iterable[str]) -> list[nn.Parameter]:
        """This rank's shards of these parameters; empty without sharding."""
        return []


WHOLE = WholeModules()


def is_sharded(model: nn.Module) -> bool:
    """Whether `fully_shard` was applied to a module of the model."""
    return any(_distributed_wrapper(type(module)) == "FSDPModule" for module in model.modules())


def is_frozen_quantized(module: nn.Module) -> bool:
    """Whether a module is a linear layer with frozen integer weights.

    The classes of bitsandbytes, GPTQ and AWQ all have `in_features`. Layers with an outlier threshold
    (`Linear8bitLt`) are excluded: they select columns by the values of all rows, which mixes records.
    """
    if not hasattr(module, "in_features") or module._modules:
        return False
    if getattr(getattr(module, "state", None), "threshold", 0.0):
        return False
    values = [v for v in (*module._parameters.values(), *module._buffers.values()) if v is not None]
    integers = (torch.uint8, torch.int8, torch.int32)
    return any(v.dtype in integers and v.dim() > 1 for v in values) and not any(
        v.requires_grad for v in values
    )


def check_model(model: nn.Module, *, sharded: bool = False) -> None:
    """Raise if a module mixes records or stores record-dependent state."""
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name, module in modules.items():
        _check_layer(name, module, sharded=sharded)
    if lazy := [name for name, value in parameters.items() if is_lazy(value)]:
        raise Unsupported(
            f"{lazy[0]} is not initialised (a Lazy module). Run the model once on public or synthetic "
            "inputs before creating the optimizer and the step."
        )
    hooked = any(value._backward_hooks for value in parameters.values())
    if hooked or any(m._backward_hooks or m._backward_pre_hooks for m in modules.values()):
        raise Unsupported(
            "the model has backward hooks, which do not run for per-sample gradients. Remove them, or "
            "move their code to forward()."
        )
    if any(value._post_accumulate_grad_hooks for value in parameters.values()):
        raise Unsupported(
            "the model has register_post_accumulate_grad_hook hooks, which do not run because autograd "
            "does not accumulate the private gradient. Remove them, and run their code after the step."
        )
    trained = trainable(model)
    for name, parameter in trained.items():
        if parameter.is_complex():
            raise Unsupported(
                f"{name} is complex, and the noise on its real and imaginary parts would be too small. "
                "Use a real parameter, and torch.view_as_complex in forward()."
            )
    if not trained:
        raise Unsupported(
            "the model has no trainable parameter. Unfreeze parameters with requires_grad_(True)."
        )


def layer_at(name: str) -> str:
    """Description of a layer for messages, e.g. "layer '1'"."""
    return f"layer {name!r}" if name else "the model"


def uses_batch_statistics(module: nn.modules.batchnorm._BatchNorm) -> bool:
    """Whether a batch norm currently normalises with batch statistics."""
    return module.training or not module.track_running_stats


def _check_layer(name: str, module: nn.Module, *, sharded: bool) -> None:
    """Raise if a layer mixes records, stores record-dependent state or reveals which rows were used."""
    layer = layer_at(name)
    described = f"{layer} is {with_article(type(module).__name__)}"
    wrapper = _distributed_wrapper(type(module))
    if wrapper == "FSDPModule" and not sharded:
        raise Unsupported(
            f"{layer} is sharded by fully_shard, but the step runs in one process. Run PrivateStep on "
            "all ranks of the model, without the argument processes."
        )
    if wrapper not in (None, "FSDPModule"):
        raise Unsupported(
            f"{layer} is wrapped in {wrapper}, which averages gradients over processes or "
            "devices before they are clipped. Pass the wrapped module (model.module): PrivateStep sums "
            "over ranks."
        )
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and uses_batch_statistics(module):
        raise Unsupported(
            f"{described} in training mode: it mixes the records of a batch, so clipping one record's "
            "gradient does not bound its influence. Call `model, changes = hush.fix(model)` for group "
            "norm (torch.nn.GroupNorm) before creating the optimizer, or freeze it with .eval()."
        )
    if isinstance(module, nn.modules.instancenorm._InstanceNorm) and (
        module.track_running_stats and module.training
    ):
        raise Unsupported(
            f"{described} with track_running_stats=True: its running statistics are released without "
            "noise. Pass track_running_stats=False, or call hush.fix(model)."
        )
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
        raise Unsupported(
            f"{described} with max_norm: it rescales the rows that a batch uses, even frozen rows, so "
            "the weights reveal which rows were used. Leave max_norm out, or call hush.fix(model)."
        )


def _distributed_wrapper(kind: type) -> str | None:
    """Name of a distributed wrapper class, found without importing it."""
    wrappers = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
    return next((base.__name__ for base in kind.__mro__ if base.__name__ in wrappers), None)


def check_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise for an optimizer that the private gradient does not support."""
    if isinstance(optimizer, torch.optim.LBFGS):
        raise Unsupported(
            "LBFGS evaluates the loss several times per step, but only one evaluation is accounted for. "
            "Use torch.optim.SGD or Adam."
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise Unsupported(
            "SparseAdam updates only rows with a gradient, but the noise has entries in all rows. Use "
            "torch.optim.Adam."
        )
    # Accelerate stores the gradient scaler in the optimizer, Lightning stores it in its strategy
    plugin = getattr(getattr(optimizer, "_strategy", None), "precision_plugin", None)
    if any(getattr(owner, "scaler", None) is not None for owner in (optimizer, plugin)):
        raise Unsupported(
            f"the optimizer is {with_article(type(optimizer).__name__)} with a gradient scaler, which "
            "would divide the private gradient although the losses are not scaled. Use bfloat16 (bf16), "
            "which needs no scaler, or pass the wrapped optimizer."
        )
    names = {id(parameter): name for name, parameter in trainable(model).items()}
    optimized = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # optimizers skip parameters without a gradient, so frozen parameters are allowed
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
            f"the optimizer does not hold {', '.join(missing[:3])}: these gradients would count towards "
            "the clipping norm, but the parameters would not be updated. Add them to the optimizer, or "
            "freeze them with requires_grad_(False)."
        )
