"""Privacy accounting: mechanisms, composition, (epsilon, delta), calibration, and the ledger."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
