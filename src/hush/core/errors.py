"""The errors and warnings of hush: each gives the value, the limit, the reason and the way out."""

_LONGEST_VALUE = 200
_LONGEST_MESSAGE = 2000


def shorten(text: str, longest: int = _LONGEST_MESSAGE) -> str:
    """The text itself, or its two ends with its length between them."""
    if len(text) <= longest:
        return text
    cut = f" ... {len(text)} characters ... "
    end = longest // 4
    return text[: longest - end - len(cut)] + cut + text[-end:]


def short_repr(value: object) -> str:
    """`repr` of a value of any size, in at most a few hundred characters.

    A file may hold a number or a string of megabytes: whole, it would hide what the message says.
    """
    try:
        return shorten(repr(value), _LONGEST_VALUE)
    except (ValueError, RecursionError):  # integers of 4300 digits, and nesting, that Python won't write
        return f"<{type(value).__name__} too large to write>"


class HushError(ValueError):
    """Something asked of hush cannot be done, or not with a guarantee.

    `key` is the setting at fault, where there is one, as a dotted path ("sampling.rate").
    """

    def __init__(self, message: str, *, key: str = "") -> None:
        super().__init__(shorten(message))
        self.key = key


class InvalidValue(HushError):
    """A number outside the range in which it means anything."""


class InvalidPlan(HushError):
    """A plan, or a plan file, that does not describe a private step."""


class Unproved(HushError):
    """A combination of parts for which nobody has proved a guarantee."""


class BudgetExceeded(HushError):
    """The next step would cost more than the budget has left."""


class LedgerError(HushError):
    """A ledger that is damaged, in use, or belongs to another run."""


class CheckpointError(HushError):
    """A checkpoint that is damaged or does not fit what it is loaded into."""


class Unsupported(HushError):
    """A model, loss or optimizer that cannot be trained privately as it is."""


class DataError(HushError):
    """Data that is missing, damaged or of the wrong shape."""


class ProcessFailed(HushError):
    """Another process of the group was killed, hung or stopped with an error: no rank goes on alone."""


class PrivacyWarning(UserWarning):
    """A guarantee that holds and promises less than it seems to."""


class PerformanceWarning(UserWarning):
    """Something that is done as asked, and slower than it could be."""
