"""Immutable values: fields checked against declared ranges, written as plain data and read back."""

import math
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, NoReturn, Self, SupportsFloat, SupportsIndex, TypeVar

import numpy as np
import numpy.typing as npt

from hush.core.errors import InvalidPlan, InvalidValue, Unsupported, short_repr

MOST = 10**12
"""Largest count: beyond it, rounding errors add up to more than the bounds allow for."""
T = TypeVar("T")
_EXAMPLES = {
    "Units": "hush.Units(owners=ids, per_unit=1)",
    "Randomness": "hush.Randomness(secure=True)",
    "Execution": "hush.Execution(physical_batch=64)",
    "Checkpoints": 'hush.Checkpoints(directory="runs/first")',
    "Logging": "hush.Logging(every=50)",
    "Distributed": "hush.Distributed(processes=False)",
    "Plan": "hush.Plan(sampling=..., clipping=..., noise=...)",
    "Adjacency": 'hush.Adjacency(neighbours="replace")',
    "Budget": "hush.Budget(epsilon=3.0, delta=1e-5)",
    "Sampling": "hush.Poisson(rate=0.01)",
    "Noise": "hush.Gaussian(multiplier=1.0)",
    "Ledger": "hush.Ledger()",
    "Module": "torch.nn.Linear(64, 10)",
    "Optimizer": "torch.optim.SGD(model.parameters(), lr=0.1)",
    "Generator": "torch.Generator()",
    "Tensor": "torch.zeros(3)",
    "dict": "what state_dict() gave",
    "str": "a string",
    "bool": "True",
}


@dataclass(frozen=True, kw_only=True)
class Range:
    """Interval of allowed numbers, with the reason and a valid example."""

    above: float = -math.inf
    at_least: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf
    why: str
    example: float

    def check(self, name: str, value: object) -> float:
        """Return `value` as a float, or raise `InvalidValue` if it is out of range."""
        number = as_float(value)
        inside = self.above < number < self.below and self.at_least <= number <= self.at_most
        if not inside or not math.isfinite(number):
            raise InvalidValue(
                f"{name}={short_repr(value)} must be {self}: {self.why}. "
                f"Pass e.g. {name}={self.example:g}.",
                key=name,
            )
        return number

    def __str__(self) -> str:
        signs = {">": self.above, ">=": self.at_least, "<": self.below, "<=": self.at_most}
        limits = [f"{sign} {limit:g}" for sign, limit in signs.items() if math.isfinite(limit)]
        return "a finite number " + " and ".join(limits) if limits else "a finite number"


def number(**limits: Any) -> Mapping[str, Range]:
    """Field metadata that declares a range; `Value` checks it."""
    return {"range": Range(**limits)}


@dataclass(frozen=True, kw_only=True)
class Value:
    """Frozen value whose fields lie in their declared ranges."""

    def __post_init__(self) -> None:
        for field in fields(self):
            allowed = field.metadata.get("range")
            if allowed is not None:
                object.__setattr__(
                    self, field.name, allowed.check(field.name, getattr(self, field.name))
                )

    def to_plain(self) -> dict[str, Any]:
        """The fields as data that TOML and JSON can hold."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: _plain(value) for name, value in values.items() if value is not None}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> Self:
        """The value that `to_plain` wrote."""
        if not isinstance(plain, dict):
            raise InvalidPlan(f"{short_repr(plain)} is no table of the settings of {cls.__name__}.")
        names = [field.name for field in fields(cls)]
        listed = f"; it has {', '.join(names)}." if names else "; it has none."
        for key in plain:
            if key not in names:
                raise InvalidPlan(
                    f"{short_repr(key)} is not a setting of {cls.__name__}{listed}", key=key
                )
        for field in fields(cls):
            if field.default is MISSING and field.name not in plain:
                raise InvalidPlan(f"{field.name!r} of {cls.__name__} is missing{listed}", key=field.name)
        return cls(**plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Value):
        return value.to_plain()
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def finite_or_none(value: Any) -> Any:
    """Plain data with None in place of infinite numbers and NaN, which JSON cannot hold."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_float(value: object) -> float:
    """`value` as a float; NaN, which no range contains, if it is not one real number."""
    if type(value) is float:  # fast path: a `SupportsFloat` check in every step is slow
        return value
    if type(value) is not int:
        if isinstance(value, (bool, str, bytes)) or not isinstance(value, SupportsFloat):
            return math.nan
        if getattr(value, "shape", ()) != () or "complex" in str(getattr(value, "dtype", "")):
            return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def as_floats(values: object) -> npt.NDArray[np.float64]:
    """`values` as an array of floats; a single NaN if they are not real numbers."""
    nothing = np.full((), np.nan)
    try:
        array = np.asarray(values)
        return nothing if array.dtype.kind in "cbSU" else array.astype(float)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return nothing


def check_count(name: str, value: object, why: str, at_least: int = 0, example: int = 1000) -> int:
    """Return `value` as an int, or raise `InvalidValue` if it is not a whole number in range."""
    number = as_float(value)
    if not math.isfinite(number) or number != int(number) or not at_least <= number <= MOST:
        raise InvalidValue(
            f"{name}={short_repr(value)} must be a whole number >= {at_least} and <= {MOST:g}: {why}. "
            f"Pass e.g. {name}={max(at_least, example)}.",
            key=name,
        )
    return int(number)


def check_kind(name: str, value: object, kind: type[T]) -> T:
    """Return `value` if it is a `kind`, or raise `InvalidValue` with an example of one."""
    if not isinstance(value, kind):
        # other values may contain records
        text = short_repr(value) if isinstance(value, str | float | int | None) else "..."
        raise InvalidValue(
            f"{name}={text} must be {with_article(kind.__name__)}, not "
            f"{with_article(type(value).__name__)}. "
            f"Pass e.g. {_EXAMPLES[kind.__name__]}.",
            key=name,
        )
    return value


def as_path(name: str, value: object) -> Path:
    """Return `value` as a path, or raise `InvalidValue` if it is not one."""
    if not isinstance(value, str | os.PathLike):
        raise InvalidValue(
            f"{name}={short_repr(value)} must be the name of a file or folder. "
            f'Pass e.g. {name}="runs/first".',
            key=name,
        )
    return Path(value)


def with_article(name: str) -> str:
    """A class name after its indefinite article: an LSTM, an Embedding, a Linear."""
    spelled = name[:2].isupper() and name[0] in "AEFHILMNORSX"
    return f"{'an' if spelled or name[:1] in 'AEIOaeio' else 'a'} {name}"


class SingleOwner:
    """Base of objects that cannot be copied or pickled."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise Unsupported(
            f"{with_article(type(self).__name__)} cannot be copied or pickled: it holds a ledger's open "
            "file and a run's randomness, and two owners would charge, or close, the same one. Copy the "
            "model alone and make a new PrivateStep for the copy with ledger=step.ledger, so that both "
            "charges add up; or load state_dict() into a new PrivateStep with that ledger."
        )
