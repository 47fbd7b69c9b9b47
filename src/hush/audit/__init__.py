"""Audits of private steps and runs: lower bounds on epsilon, and a self-test."""

from typing import TYPE_CHECKING, Any

from hush.core import lazy_modules

if TYPE_CHECKING:
    from hush.audit.run_self_test import self_test

__all__ = ["self_test"]


def __getattr__(name: str) -> Any:
    # imported on first use, because the lower bounds need no torch
    if name != "self_test":
        return lazy_modules(__name__)(name)
    from hush.audit.run_self_test import self_test

    return self_test
