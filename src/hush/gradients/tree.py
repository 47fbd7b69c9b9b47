"""Trees of tensors: tuples, lists and dictionaries, as models take them."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


def tree_leaves(value: Any) -> Iterator[Tensor]:
    """The tensors of a tree."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tree_leaves(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tree_leaves(part)


def tree_map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The tree with a function applied to every tensor; other values stay as they are."""
    if isinstance(value, Tensor):
        return function(value)
    if type(value) in (list, tuple):
        return type(value)(tree_map(part, function) for part in value)
    if isinstance(value, dict):
        return {key: tree_map(part, function) for key, part in value.items()}
    return value


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs: a tuple is several arguments, a dictionary is arguments by name."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
