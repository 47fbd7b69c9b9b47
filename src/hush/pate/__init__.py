"""PATE: teachers on disjoint records, noisy votes, a student."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
