"""hush in other libraries' own interfaces; each module needs the library it is named after."""

from importlib import import_module
from types import ModuleType

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)


def require(module: str, extra: str) -> ModuleType:
    """Import an optional library, or explain how to install it.

    Args:
        module: Import name of the library.
        extra: Extra of hush that installs it.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{error.name} is not installed, and this part of hush needs it: pip install "
            f"'hush[{extra}]'.",
            name=error.name,
        ) from error
