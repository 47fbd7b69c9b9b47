"""hush in other libraries' own interfaces; each module needs the library it is named for."""

from hush.core import lazy_modules

__getattr__ = lazy_modules(__name__)
