"""Distinguishing attacks on every mechanism that is charged."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
