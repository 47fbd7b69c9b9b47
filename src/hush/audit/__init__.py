"""Attacks on what the library runs: what they find never exceeds what is charged."""

from hush.core.lazy import lazy_modules

__getattr__ = lazy_modules(__name__)
