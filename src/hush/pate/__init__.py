"""Teachers, noisy votes, student."""

from hush.core.lazy import lazy_modules

__getattr__ = lazy_modules(__name__)
