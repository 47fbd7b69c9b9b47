"""Privacy audits: lower bounds on epsilon from canaries."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
