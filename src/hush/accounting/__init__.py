"""Profile, amplification, composition, (epsilon, delta); the ledger that keeps the count."""

from hush.core.lazy import lazy_modules

__getattr__ = lazy_modules(__name__)
