"""Immutable values with validated fields, and their conversion to and from plain data."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self, TypeVar, get_args

import numpy as np
import numpy.typing as npt

from hush.core.errors import HushError, InvalidPlan, InvalidValue, short_repr

MOST = 10**12
"""Largest count for which the bounds on accumulated rounding errors are valid."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Range:
    """Interval of allowed numbers, with the reason and a valid example."""

    above: float = -math.inf
    at_least: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf
    whole: bool = False
    why: str
    example: float

    def check(self, name: str, value: object) -> float:
        """Return `value` as a number, or raise `InvalidValue` if it is out of range."""
        number = as_float(value)
        inside = self.above < number < self.below and self.at_least <= number <= self.at_most
        if not inside or not math.isfinite(number) or (self.whole and number != int(number)):
            text = f"{name}={short_repr(value)} must be {self}: {self.why}. Pass e.g. "
            raise InvalidValue(f"{text}{name}={self.example:g}.", key=name)
        return int(number) if self.whole else number

    def __str__(self) -> str:
        signs = {">": self.above, ">=": self.at_least, "<": self.below, "<=": self.at_most}
        limits = [f"{sign} {limit:g}" for sign, limit in signs.items() if math.isfinite(limit)]
        return f"a {'whole' if self.whole else 'finite'} number {' and '.join(limits)}"


def number(**limits: Any) -> Mapping[str, Any]:
    """Field metadata for a number in a range. None is allowed if it is the default."""
    allowed = Range(**limits)
    return {"range": allowed, "check": allowed.check}


def count(why: str, *, at_most: int = MOST, at_least: int = 1, example: int = 1) -> Mapping[str, Any]:
    """Field metadata for a whole number."""
    example = max(at_least, example)
    return number(whole=True, why=why, at_least=at_least, at_most=at_most, example=example)


def each(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Field metadata for a non-empty list of numbers in the same range."""
    return {
        "check": lambda name, values: tuple(item["check"](name, one) for one in as_list(name, values))
    }


def one_of(literal: object, why: str) -> Mapping[str, Any]:
    """Field metadata for a `Literal` of strings. Error messages suggest the first one."""
    words = get_args(literal)

    def check(name: str, value: object) -> str:
        if isinstance(value, str) and value in words:
            return value
        text = f"{name}={short_repr(value)} must be one of {', '.join(words)}: {why}. Pass e.g. "
        raise InvalidValue(f'{text}{name}="{words[0]}".', key=name)

    return {"check": check}


def nested(kind: "type[Value]") -> Mapping[str, Any]:
    """Field metadata for a `Value` or its plain data. Keys of errors start with the field name."""

    def check(name: str, value: object) -> Value:
        if isinstance(value, dict):
            try:
                return kind.from_plain(value)
            except HushError as error:
                raise type(error)(str(error), key=f"{name}.{error.key}") from None
        if not isinstance(value, kind):
            known = ", ".join(sorted(getattr(kind, "kinds", ()))) or kind.__name__
            text = f"{name}={short_repr(value)} is not {with_article(kind.__name__)}: pass {known}."
            raise InvalidPlan(text, key=name)
        return value

    return {"check": check}


@dataclass(frozen=True, kw_only=True)
class Value:
    """Frozen value with validated fields."""

    def __new__(cls, *values: object, **named: object) -> Self:
        by_name = {field.name: field.kw_only for field in fields(cls)}
        unknown = named.keys() - by_name
        if unknown or len(values) > list(by_name.values()).count(False):
            shown = ", ".join(f"{name}=..." for name in by_name)
            reason = "needs keyword arguments: swapped numbers would change the privacy cost"
            if unknown:
                reason = f"has no argument {min(unknown)!r}"
            raise InvalidValue(f"{cls.__name__} {reason}. Pass {cls.__name__}({shown}).")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for field in fields(self):
            check, value = field.metadata.get("check"), getattr(self, field.name)
            if check is not None and not (value is None and field.default is None):
                object.__setattr__(self, field.name, check(field.name, value))

    def to_plain(self) -> dict[str, Any]:
        """The fields as plain data for TOML and JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """Restore a value from the output of `to_plain`."""
        known = {field.name: field.default is MISSING for field in fields(cls)}
        listed = f"; it has {', '.join(known) or 'none'}."
        for key in plain:
            if key not in known:
                raise InvalidPlan(
                    f"{short_repr(key)} is not an argument of {cls.__name__}{listed}", key=key
                )
        for key, required in known.items():
            if required and key not in plain:
                raise InvalidPlan(f"{key!r} of {cls.__name__} is missing{listed}", key=key)
        return cls(**plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Value):
        return value.to_plain()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def finite_or_none(value: Any) -> Any:
    """Replace infinite numbers and NaN, which JSON does not support, by None."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_float(value: Any) -> float:
    """`value` as a float. Returns NaN, which is outside every range, if it is not a number."""
    if type(value) is float:
        return value
    try:
        return math.nan if isinstance(value, bool | str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def as_floats(values: object) -> npt.NDArray[np.float64]:
    """`values` as an array of floats. Returns a single NaN if they are not real numbers."""
    try:
        array = np.asarray(values)
        return np.full((), np.nan) if array.dtype.kind in "cbSU" else array.astype(float)
    except (TypeError, ValueError, RuntimeError):
        return np.full((), np.nan)


def as_list(name: str, values: Any) -> Sequence[Any]:
    """Return `values`, or raise `InvalidValue` if it is not a non-empty list."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        text = f"{name}={short_repr(values)} must be a non-empty list, with an entry for each block: a "
        text += f"block without an entry is not private. Pass e.g. {name}=(1, 2)."
        raise InvalidValue(text, key=name)
    return values


def check_count(name: str, value: object, why: str, at_least: int = 0, example: int = 1000) -> int:
    """Return `value` as an int, or raise `InvalidValue` if it is not a whole number in range."""
    if type(value) is int and at_least <= value <= MOST:  # fast path, as every step calls this
        return value
    return int(count(why, at_least=at_least, example=example)["check"](name, value))


def check_kind(name: str, value: object, kind: type[T]) -> T:
    """Return `value`, or raise `InvalidValue` if it is not a `kind`."""
    if not isinstance(value, kind):
        # do not print other values, which may contain records
        text = short_repr(value) if isinstance(value, str | float | int | None) else "..."
        expected, actual = with_article(kind.__name__), with_article(type(value).__name__)
        raise InvalidValue(f"{name}={text} must be {expected}, not {actual}.", key=name)
    return value


def with_article(name: str) -> str:
    """Class name with its indefinite article: an LSTM, an Embedding, a Linear."""
    spelled = name[:2].isupper() and name[0] in "AEFHILMNORSX"
    return f"{'an' if spelled or name[:1] in 'AEIOaeio' else 'a'} {name}"
