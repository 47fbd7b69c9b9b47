"""The errors and warnings of hush; `HushError` is the base class of the errors."""

from hush.core.errors import *  # noqa: F403  (the list is `__all__` of that module)
