"""Private steps of several processes: handshake, random streams, shares, noise and charge."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
