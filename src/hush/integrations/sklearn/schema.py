"""Public schema of a table: bounds and categories that are declared, never read off the records."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.utils import check_array

from hush.core.errors import DataError, InvalidValue, short_repr
from hush.core.value import Value, check_kind, number

Array = npt.NDArray[np.float64]

_BOUND = number(
    at_least=-1e12,
    at_most=1e12,
    why="a column is scaled by its declared bounds, and what lies beyond them is clamped, so that one "
    "record's influence is bounded",
    example=100.0,
)


@dataclass(frozen=True, kw_only=True)
class Column(Value, ABC):
    """Declaration of one column, from what it means and not from its values."""

    @abstractmethod
    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        """Features of a column, in [-1, 1]: a row a record, each by itself.

        Args:
            name: of the column.
            values: of the records, one each.
        """


@dataclass(frozen=True, kw_only=True)
class Numeric(Column):
    """A column, or a target, of numbers within public bounds; what lies beyond them is clamped.

    Args:
        low: lower bound.
        high: upper bound.
        log: scale by the logarithm of the distance from `low`, for columns that span decades.
    """

    low: float = field(metadata=_BOUND)
    high: float = field(metadata=_BOUND)
    log: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_kind("log", self.log, bool)
        if not self.low < self.high:
            raise InvalidValue(
                f"low={self.low:g} must be below high={self.high:g}: a column is scaled by the distance "
                "of its declared bounds.",
                key="low",
            )

    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        return self.scale(numbers(f"column {name!r}", values))[:, None]

    def scale(self, values: Array) -> Array:
        """Values clamped to the bounds and mapped to [-1, 1], each by itself."""
        above = np.clip(values, self.low, self.high) - self.low
        width = self.high - self.low
        share = np.log1p(above) / np.log1p(width) if self.log else above / width
        return np.clip(2.0 * share - 1.0, -1.0, 1.0)

    def unscale(self, scaled: Array) -> Array:
        """Values within the bounds that `scale` maps to these, clamped to [-1, 1]."""
        share = (np.clip(scaled, -1.0, 1.0) + 1.0) / 2.0
        width = self.high - self.low
        above = np.expm1(share * np.log1p(width)) if self.log else share * width
        return np.clip(self.low + above, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Categorical(Column):
    """A column of a public list of values, encoded one-hot.

    Args:
        values: every value that may occur, whether any record has it or not; one for "unknown" too, if
            there are such records.
    """

    values: Sequence[Hashable]

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "values", distinct("values", self.values, ("red", "green")))

    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        return np.eye(len(self.values))[indices(values, self.values, f"column {name!r}", "schema")]


Schema = Numeric | Mapping[str, Column] | Sequence[Column]
"""One `Numeric` for all columns, a column for each name, or a column for each place."""


def distinct(name: str, values: object, example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The declared values as a tuple, checked to be two different ones at least."""
    listed: Any = values.tolist() if isinstance(values, np.ndarray) else values
    try:
        known = () if isinstance(listed, str | bytes) else tuple(listed)
        several = len(set(known)) == len(known) >= 2
    except TypeError:
        several = False
    if not several:
        raise InvalidValue(
            f"{name}={short_repr(values)} must be a list of at least two different values, declared "
            "beforehand: a list read off the records would tell which values occur. Pass e.g. "
            f"{name}={example!r}.",
            key=name,
        )
    return known


def indices(
    values: npt.NDArray[Any], known: Sequence[Any], what: str, declared: str
) -> npt.NDArray[np.int64]:
    """Place of each value in a public list; raises, without the value, if one is not in it."""
    places = {value: place for place, value in enumerate(known)}
    try:
        return np.fromiter((places[value] for value in values.tolist()), np.int64, len(values))
    except (KeyError, TypeError):
        raise DataError(
            f"{what} holds a value that is not declared in {declared}= (which is private and not "
            f"shown); declared are {short_repr(tuple(known))}. Values are not learnt from the records, "
            "as that would tell who has one. Declare every value that may occur, or map others to a "
            "declared one, each record by itself."
        ) from None


def declared_columns(schema: Schema | None, width: int) -> tuple[tuple[str, Column], ...]:
    """Names and columns of a schema; those without a name are called x0, x1, ..."""
    if isinstance(schema, Numeric):
        return tuple((f"x{place}", schema) for place in range(width))
    named: list[tuple[str, Any]] = []
    if isinstance(schema, Mapping):
        named = list(schema.items())
    elif isinstance(schema, Sequence) and not isinstance(schema, str | bytes):
        named = [(f"x{place}", column) for place, column in enumerate(schema)]
    if not named or not all(isinstance(column, Column) for _, column in named):
        raise InvalidValue(
            f"schema={short_repr(schema)} must declare every column: bounds and categories read off the "
            'records would not be private. Pass e.g. schema={"age": Numeric(low=0, high=100), '
            '"sex": Categorical(values=("female", "male"))}, or one Numeric for all columns.',
            key="schema",
        )
    return tuple(named)


def read_columns(table: Any, schema: Schema | None) -> list[tuple[str, Column, npt.NDArray[Any]]]:
    """Name, declaration and values of each column of the schema, in its order.

    Args:
        table: a matrix, or a data frame, whose columns are found by name.
        schema: as declared.
    """
    names = getattr(table, "columns", None)
    if names is not None and isinstance(schema, Mapping):
        declared = declared_columns(schema, len(names))
        missing = [name for name, _ in declared if name not in names]
        outside = [name for name in names if name not in schema]
        if missing or outside:
            found = [
                *([f"the schema has columns {short_repr(missing)} that X lacks"] if missing else []),
                *([f"X has columns {short_repr(outside)} outside the schema"] if outside else []),
            ]
            raise DataError(
                f"{', and '.join(found)}: what is not declared has no bound and no public categories. "
                "Schema and X must have the same columns: declare them in schema=, or drop them from X."
            )
        return [(name, column, np.asarray(table[name])) for name, column in declared]
    # scikit-learn's messages about dimensions and types show cells; here they are converted column by
    # column, and not shown
    matrix = check_array(table, dtype=None, ensure_all_finite=False, ensure_2d=False)
    if matrix.ndim != 2:
        raise DataError(
            f"X has {matrix.ndim} dimensions, and a record is a row of columns. Reshape your data: "
            "X.reshape(-1, 1) has one column, X.reshape(1, -1) one record."
        )
    declared = declared_columns(schema, matrix.shape[1])
    if len(declared) != matrix.shape[1]:
        raise DataError(
            f"X has {matrix.shape[1]} columns and the schema declares {len(declared)}: what is not "
            "declared has no bound and no public categories. Declare one a column, in their order."
        )
    return [(name, column, matrix[:, place]) for place, (name, column) in enumerate(declared)]


def numbers(name: str, values: npt.NDArray[Any]) -> Array:
    """Finite numbers of a column; raises, without the value, if one is none."""
    try:
        converted = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        converted = np.full(1, np.nan)
    if not np.isfinite(converted).all():
        raise DataError(
            f"{name} holds NaN, infinity or what is no number (which is private and not shown): it has "
            "no place between the declared bounds. Fill in or drop such records, each by itself."
        )
    return converted


@dataclass(frozen=True, eq=False)
class Encoded:
    """Columns of a table in [-1, 1]: those of numbers, and one-hot ones beside them."""

    numeric: Array
    categorical: Array
    categories: int
    """How many categorical columns there are: each row has as many ones."""


def encode(table: Any, schema: Schema | None) -> Encoded:
    """Features of each record by the public schema alone, each record by itself.

    Args:
        table: a matrix or a data frame with the schema's columns.
        schema: as declared.
    """
    columns = read_columns(table, schema)
    rows = len(columns[0][2])
    parts: tuple[list[Array], list[Array]] = [np.zeros((rows, 0))], [np.zeros((rows, 0))]
    for name, column, values in columns:
        parts[isinstance(column, Categorical)].append(column.encode(name, values))
    return Encoded(np.hstack(parts[0]), np.hstack(parts[1]), len(parts[1]) - 1)
