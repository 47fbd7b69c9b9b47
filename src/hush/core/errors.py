"""Errors and warnings. Each message states the value, the limit, the reason and a solution."""

__all__ = ["BudgetExceeded", "CheckpointError", "DataError", "HushError", "InvalidPlan", "InvalidValue"]
__all__ += ["LedgerError", "ProcessFailed", "Unproved", "Unsupported"]
__all__ += ["PerformanceWarning", "PrivacyWarning"]

_LONGEST_VALUE = 200
_LONGEST_MESSAGE = 2000


def shorten(text: str, longest: int = _LONGEST_MESSAGE) -> str:
    """Shorten a text in the middle if it is longer than `longest` characters."""
    if len(text) <= longest:
        return text
    cut = f" ... {len(text)} characters ... "
    end = longest // 4
    return text[: longest - end - len(cut)] + cut + text[-end:]


def short_repr(value: object) -> str:
    """`repr` of a value in at most 200 characters."""
    try:
        return shorten(repr(value), _LONGEST_VALUE)
    except (ValueError, RecursionError):  # integers above 4300 digits; deep nesting
        return f"<{type(value).__name__} too large to print>"


class HushError(ValueError):
    """Base class of all errors of hush; `key` is the name of the invalid value, e.g. "sampling.rate"."""

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(shorten(message))
        self.key = key


class InvalidValue(HushError):
    """A value outside its valid range."""


class InvalidPlan(HushError):
    """A plan, or a plan file, that does not describe a private step."""


class Unproved(HushError):
    """A combination of parts without a proved guarantee."""


class BudgetExceeded(HushError):
    """The next step would cost more than the remaining budget."""


class LedgerError(HushError):
    """A ledger that is damaged, in use, or belongs to another run."""


class CheckpointError(HushError):
    """A checkpoint that is damaged or belongs to another run."""


class Unsupported(HushError):
    """A model, loss or optimizer that cannot be trained privately without a change."""


class DataError(HushError):
    """Data that is missing, damaged or of the wrong shape."""


class ProcessFailed(HushError):
    """Another process of the group was killed, timed out or raised an error, so all ranks stop."""


class PrivacyWarning(UserWarning):
    """A valid guarantee that is weaker than it looks."""


class EarlierRun(PrivacyWarning):
    """Initial weights from a private run with another ledger."""


class PerformanceWarning(UserWarning):
    """Slower execution with the same result and guarantee."""
