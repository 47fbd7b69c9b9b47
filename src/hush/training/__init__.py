"""One private step, the loop around it, and what survives a crash."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
