"""Private steps, the training loop, checkpoints and tuning."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
