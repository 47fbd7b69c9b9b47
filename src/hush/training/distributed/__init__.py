"""Private steps in several processes: handshake, random streams, shares, noise and accounting."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
