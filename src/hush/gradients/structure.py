"""Tensors in tuples, lists and dictionaries, as models take them."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in it."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from tensors(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)


def each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same with every tensor in it changed."""
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(each(part, change) for part in value)
    if isinstance(value, dict):
        return {key: each(part, change) for key, part in value.items()}
    return value


def called(model: nn.Module, inputs: Any) -> Any:
    """The model's outputs: a tuple is several arguments, a dictionary is arguments by name."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
