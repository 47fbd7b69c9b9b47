"""Trees of tensors (tuples, lists, dictionaries), and calls of models and losses with such trees."""

import inspect
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import DataError, Unsupported
from hush.core.value import with_article

Loss = Callable[[Any, Any], Tensor]
"""Function from outputs and targets of a batch to one value per record."""

Views = Callable[[Any], Any]
"""Function from the inputs of one record to several augmented views, along a new first dimension."""

Gradients = tuple[Tensor | None, ...]
"""Gradients of a layer's inputs; None for inputs that need no gradient."""


def tree_leaves(value: Any) -> Iterator[Tensor]:
    """Iterate over the tensors of a tree."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tree_leaves(part)
    elif isinstance(value, (dict, UserDict)):
        for part in value.values():
            yield from tree_leaves(part)


def tree_map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Apply a function to every tensor of a tree; other values are unchanged."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)([tree_map(part, function) for part in value])
    if isinstance(value, (dict, UserDict)):  # e.g. from a tokenizer of the transformers library
        return {key: tree_map(part, function) for key, part in value.items()}
    return value


def submodules(model: nn.Module) -> list[nn.Module]:
    """Modules of a model; three times as fast as `model.modules()`, and in a different order."""
    found = {id(model): model}
    pending = [model]
    while pending:
        for child in pending.pop()._modules.values():
            if child is not None and id(child) not in found:
                found[id(child)] = child
                if child._modules:
                    pending.append(child)
    return list(found.values())


def structure(model: nn.Module) -> list[Any]:
    """Fingerprint of modules, modes, hooks and parameters; cached decisions of a step depend on it."""
    found: list[Any] = []
    for module in submodules(model):
        hooks = len(module._forward_hooks) + len(module._forward_pre_hooks)
        hooks += len(module._backward_hooks) + len(module._backward_pre_hooks)
        found += id(module), module.training, hooks
        for value in module._parameters.values():
            if value is not None:
                found += id(value), value.requires_grad, value.dtype, value.grad is None
    return found


def expand_views(views: Callable[[Any], Any], inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Views of all records, concatenated, with repeated targets."""
    by_record = torch.vmap(views, randomness="different")(inputs)
    count = next(tree_leaves(by_record)).shape[1]
    return tree_map(by_record, lambda value: value.flatten(0, 1)), tree_map(
        targets, lambda value: value.repeat_interleave(count, dim=0)
    )


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call the model; a tuple is passed as positional arguments, a dictionary as keyword arguments."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def check_arguments(model: nn.Module, inputs: Any) -> None:
    """Raise if `forward` does not accept these inputs."""
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):  # compiled code has no signature; the call raises
        return
    named: dict[str, Any] = inputs if isinstance(inputs, dict) else {}
    placed = () if isinstance(inputs, dict) else inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        signature.bind(*placed, **named)
    except TypeError as error:
        supplied = f"the names {', '.join(map(str, named))}" if named else "no names"
        raise DataError(
            f"the inputs have {supplied}, but forward() takes {signature} ({error}): the keys of a "
            "dictionary are keyword arguments, and a tuple contains positional arguments. Rename, "
            "remove or add inputs."
        ) from error


def call_loss(loss: Callable[[Any, Any], Any], outputs: Any, targets: Any, count: int) -> Tensor:
    """Compute the losses of a batch of `count` records or views: (count,)."""
    try:
        values = loss(outputs, targets)
    except (TypeError, AttributeError) as error:
        if isinstance(outputs, Tensor):
            raise
        kind = with_article(type(outputs).__name__)
        part = "outputs[0]"
        if isinstance(outputs, dict):
            part = 'outputs["logits"]' if type(outputs) is dict else "outputs.logits"
        raise Unsupported(
            f"the model returns {kind}, which the loss does not support ({error}). "
            "Pass a loss that selects the scores, e.g. lambda outputs, y: "
            f'torch.nn.functional.cross_entropy({part}, y, reduction="none").'
        ) from error
    if not isinstance(values, Tensor) or not values.is_floating_point():
        kind = str(values.dtype) if isinstance(values, Tensor) else with_article(type(values).__name__)
        raise Unsupported(
            f"the loss returned {kind}: a loss must be a differentiable tensor of floating-point "
            "numbers, one per record. Return this tensor, without .item(), float() or argmax."
        )
    if values.shape == (count,):
        return values
    if values.dim() == 0:  # the loss reduces over the batch of one record
        return values.expand(count)
    raise Unsupported(
        f"the loss returned shape {tuple(values.shape)} for a batch of one record, not (1,): sum or "
        "average its values within the record, e.g. with .flatten(1).mean(1)."
    )


def local_shard(parameter: Tensor) -> Tensor:
    """Local shard of a sharded parameter; other parameters are returned unchanged."""
    shard: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return shard
