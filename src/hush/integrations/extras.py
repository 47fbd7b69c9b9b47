"""Optional libraries: imported where they are used, with the way to install one that is missing."""

from importlib import import_module
from types import ModuleType


def require(module: str, extra: str) -> ModuleType:
    """The module of an optional library.

    Args:
        module: its import name.
        extra: of hush, that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed, which this part of hush works with: pip install "
            f"'hush[{extra}]'.",
            name=error.name,
        ) from error
