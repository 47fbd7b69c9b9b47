"""Attacks on what the library runs: what they find never exceeds what is charged."""

from typing import TYPE_CHECKING, Any

from hush.core import lazy_modules

if TYPE_CHECKING:
    from hush.audit.run_self_test import self_test

__all__ = ["self_test"]

_modules = lazy_modules(__name__)


def __getattr__(name: str) -> Any:
    # when it is first used: most of what is here needs no torch
    if name != "self_test":
        return _modules(name)
    from hush.audit.run_self_test import self_test

    return self_test
