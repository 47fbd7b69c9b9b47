"""Modules and parameters of a model by their names, walked anew only where its structure has changed.

A step asks for them several times, and torch's generators take longer over a deep model than the checks
that ask. Whether a child or a parameter was added, replaced, moved or renamed is seen in a pass over the
modules' plain dictionaries.
"""

from collections.abc import Iterable
from functools import lru_cache
from itertools import chain
from operator import is_
from typing import Any

from torch import nn

_WALKS = ("named_modules", "named_parameters", "_named_members")
"""Methods that torch's walks consist of: a class with one of its own is walked by torch."""


class ModuleTree:
    """Names of a model's modules and parameters, as torch gives them.

    **Guarantee.** At every call, `modules` and `parameters` are equal to what `named_modules()` and
    `named_parameters()` would give then, in the same order. The names, the order and the identity of
    every module's children and parameters are compared with those of the last walk: a walk from the same
    root over the same children would take the same course. What is compared is referenced here, so that
    nothing else can have taken on its identity.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules: dict[str, nn.Module] = {"": model}
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: list[Any] = []
        self._values: list[Any] = []
        self._cached = False

    def modules(self) -> dict[str, nn.Module]:
        """All modules by their names, the model itself first; not to be written to."""
        self._walk_if_changed()
        return self._modules

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by their names, each once; not to be written to."""
        self._walk_if_changed()
        return self._parameters

    def trainable(self) -> dict[str, nn.Parameter]:
        """Parameters that require a gradient now, by their names."""
        return {name: value for name, value in self.parameters().items() if value.requires_grad}

    def _walk_if_changed(self) -> None:
        if self._cached:
            names, values = _links(self._modules.values())
            if (
                names == self._names
                and len(values) == len(self._values)
                and all(map(is_, values, self._values))
            ):
                return
        self._modules = _named_modules(self.model)
        self._cached = not any(map(_walks_by_itself, set(map(type, self._modules.values()))))
        if self._cached:
            self._names, self._values = _links(self._modules.values())
            self._parameters = _named_parameters(self._modules)
        else:
            self._modules = dict(self.model.named_modules())
            self._parameters = dict(self.model.named_parameters())


def _links(modules: Iterable[nn.Module]) -> tuple[list[Any], list[Any]]:
    """What a walk goes by: names, with how many are whose and the classes, and what they stand for."""
    owners = [*modules]
    tables = [module._modules for module in owners] + [module._parameters for module in owners]
    filled = [table for table in tables if table]
    names = chain.from_iterable([table.keys() for table in filled])
    values = chain.from_iterable([table.values() for table in filled])
    return [*map(type, owners), *map(len, tables), *names], [*values]


def _named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by name in the order of torch: before its children, and at its first place."""
    found: dict[str, nn.Module] = {}
    visited: set[int] = set()
    pending: list[tuple[str, nn.Module]] = [("", model)]
    while pending:
        name, module = pending.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        found[name] = module
        prefix = f"{name}." if name else ""
        children = [
            (prefix + part, child) for part, child in module._modules.items() if child is not None
        ]
        pending += reversed(children)
    return found


def _named_parameters(modules: dict[str, nn.Module]) -> dict[str, nn.Parameter]:
    found: dict[str, nn.Parameter] = {}
    visited: set[int] = set()
    for name, module in modules.items():
        prefix = f"{name}." if name else ""
        for part, value in module._parameters.items():
            if value is not None and id(value) not in visited:
                visited.add(id(value))
                found[prefix + part] = value
    return found


@lru_cache
def _walks_by_itself(kind: type) -> bool:
    """Whether a class of modules says itself what belongs to it."""
    return any(getattr(kind, name) is not getattr(nn.Module, name) for name in _WALKS)
