"""PATE: teachers that are trained on disjoint records, noisy votes, and a student."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
