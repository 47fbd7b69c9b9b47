"""One private step run by several processes: handshake, streams, shares, noise and charge."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
