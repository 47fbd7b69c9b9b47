"""Modules of a package as its attributes, loaded when they are first asked for."""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType


def lazy_modules(package: str) -> Callable[[str], ModuleType]:
    """A module-level `__getattr__` that imports the modules of a package by their names.

    Args:
        package: The package's `__name__`.
    """

    def attribute(name: str) -> ModuleType:
        full = f"{package}.{name}"
        if not name.startswith("_"):
            try:
                return import_module(full)
            except ModuleNotFoundError as error:
                if error.name != full:
                    raise
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute
