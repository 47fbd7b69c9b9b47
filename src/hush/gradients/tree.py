"""Tensors in tuples, lists and dictionaries, as models take them."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


def tree_leaves(value: Any) -> Iterator[Tensor]:
    """The tensors in it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tree_leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tree_leaves(part)


def tree_map(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(tree_map(part, change) for part in value)
    if isinstance(value, dict):
        return {key: tree_map(part, change) for key, part in value.items()}
    return value


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs: a tuple is several arguments, a dictionary is arguments by name."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
