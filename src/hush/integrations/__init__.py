"""Private training with the interfaces of other libraries; each module needs its library."""

from importlib import import_module
from types import ModuleType

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)


def require(module: str, extra: str) -> ModuleType:
    """Import an optional library; raise with the extra of hush that installs it."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed, and this part of hush needs it. "
        text += f"In a clone of hush, run pip install '.[{extra}]'."
        raise ImportError(text, name=error.name) from error
