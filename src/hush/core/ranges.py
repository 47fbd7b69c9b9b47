"""Ranges of numbers as data: declared beside a field, checked when the value is made."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsFloat, TypeVar

import numpy as np
import numpy.typing as npt

from hush.core.errors import InvalidValue, short_repr


@dataclass(frozen=True, kw_only=True)
class Range:
    """The numbers a field may hold, why, and one that works."""

    above: float = -math.inf
    at_least: float = -math.inf
    below: float = math.inf
    at_most: float = math.inf
    why: str
    example: float

    def check(self, name: str, value: object) -> float:
        """Return `value` as a float, or raise an error that says what would be right."""
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
        limits = [
            f"{sign} {limit:g}"
            for sign, limit in (
                (">", self.above),
                (">=", self.at_least),
                ("<", self.below),
                ("<=", self.at_most),
            )
            if math.isfinite(limit)
        ]
        return "a finite number " + " and ".join(limits) if limits else "a finite number"


MOST = 10**12
"""The largest count: beyond it rounding errors add up to more than the bounds allow for."""


def number(**limits: Any) -> Mapping[str, Range]:
    """Field metadata that declares a range; `Value` checks it."""
    return {"range": Range(**limits)}


def finite_or_none(value: Any) -> Any:
    """Plain data with None in place of numbers that are not finite, for which JSON has no word."""
    if isinstance(value, dict):
        return {key: finite_or_none(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_float(value: object) -> float:
    """`value` as a float, NaN when it is not one real number (NaN lies in no range)."""
    if type(value) is float:  # nearly always, and what a protocol costs is felt in every step
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
    """The values as an array of floats, a single NaN where they are not real numbers."""
    nothing = np.full((), np.nan)
    try:
        array = np.asarray(values)
        return nothing if array.dtype.kind in "cbSU" else array.astype(float)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return nothing


def check_count(name: str, value: object, why: str, at_least: int = 0, example: int = 1000) -> int:
    """Return `value` as an int, or raise an error that says why it must be a whole number."""
    number = as_float(value)
    if not math.isfinite(number) or number != int(number) or not at_least <= number <= MOST:
        raise InvalidValue(
            f"{name}={short_repr(value)} must be a whole number >= {at_least} and <= {MOST:g}: {why}. "
            f"Pass e.g. {name}={max(at_least, example)}.",
            key=name,
        )
    return int(number)


T = TypeVar("T")
_EXAMPLES = {
    "Plan": "hush.Plan(sampling=..., clipping=..., noise=...)",
    "Adjacency": 'hush.Adjacency(neighbours="replace")',
    "Budget": "hush.Budget(epsilon=3.0, delta=1e-5)",
    "Sampling": "hush.Coordinate(rate=0.5)",
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


def with_article(name: str) -> str:
    """A class's name after "a" or "an", by how it is spoken: an LSTM, an Embedding, a Linear."""
    spelled = name[:2].isupper() and name[0] in "AEFHILMNORSX"
    return f"{'an' if spelled or name[:1] in 'AEIOaeio' else 'a'} {name}"


def check_kind(name: str, value: object, kind: type[T]) -> T:
    """Return `value` if it is a `kind`; else raise an error that says what would be one."""
    if not isinstance(value, kind):
        # a value of some size may be records
        text = short_repr(value) if isinstance(value, str | float | int | None) else "..."
        raise InvalidValue(
            f"{name}={text} must be {with_article(kind.__name__)}, not "
            f"{with_article(type(value).__name__)}. "
            f"Pass e.g. {_EXAMPLES[kind.__name__]}.",
            key=name,
        )
    return value


def as_path(name: str, value: object) -> Path:
    """Return `value` as a path, or raise an error that says what would be one."""
    if not isinstance(value, str | os.PathLike):
        raise InvalidValue(
            f"{name}={short_repr(value)} must be the name of a file or folder. "
            f'Pass e.g. {name}="runs/first".',
            key=name,
        )
    return Path(value)
