"""State that forward passes change for all records alike, put back so that every pass begins from it.

How often it has changed would tell how many passes there were, and with them how many slots were drawn;
and a pass that follows another would compute other gradients for the same record.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn

from hush.gradients.checks.attribute_contents import restorer
from hush.gradients.checks.fixed_attributes import NOT_WATCHED, Attribute

HOOKS = frozenset(name for name in nn.Module().__dict__ if "_hooks" in name)
"""Tables of hooks: what a pass adds to them goes with the attribute that says that they are there."""

Restorers = dict[Attribute, Callable[[], Any]]
"""What gives an attribute the contents it had."""


def watched_values(modules: list[nn.Module]) -> Iterator[tuple[Attribute, Any]]:
    """Plain attributes and buffers of modules."""
    for number, module in enumerate(modules):
        for name, value in module.__dict__.items():
            if name not in NOT_WATCHED or name in HOOKS:
                yield (number, name), value
        for name, value in module._buffers.items():
            yield (number, name), value


def restorers(modules: list[nn.Module], attributes: Iterable[Attribute] | None = None) -> Restorers:
    """Restorers of all watched attributes that are there, or of those that are named."""
    named = None if attributes is None else set(attributes)
    return {
        key: restorer(value)
        for key, value in watched_values(modules)
        if named is None or key in named or key[1] in HOOKS
    }


def restore(modules: list[nn.Module], attributes: Iterable[Attribute], before: Restorers) -> None:
    """Put attributes back as they were, and take away those that were not there; hooks with them."""
    for (_, name), table in before.items():
        if name in HOOKS:
            table()
    for number, name in attributes:
        module = modules[number]
        if (number, name) not in before:
            module._buffers.pop(name, None)
            module.__dict__.pop(name, None)
            continue
        owner = module._buffers if name in module._buffers else module.__dict__
        owner[name] = before[number, name]()
