"""Public schema of a table: declared bounds and categories, never learned from the records."""

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

_WHY = "values are clamped to the declared bounds to limit the influence of one record"
_BOUND = number(at_least=-1e12, at_most=1e12, why=_WHY, example=100.0)


@dataclass(frozen=True, kw_only=True)
class Column(Value, ABC):
    """Declaration of one column. It must not depend on the values in the records."""

    @abstractmethod
    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        """Features in [-1, 1], one row per record, each encoded independently of the others."""


@dataclass(frozen=True, kw_only=True)
class Numeric(Column):
    """Numeric column or target with public bounds. Values outside the bounds are clamped.

    Args:
        low: Lower bound.
        high: Upper bound.
        log: Scale by the logarithm of the distance from `low`, for columns that span decades.
    """

    low: float = field(metadata=_BOUND)
    high: float = field(metadata=_BOUND)
    log: bool = field(default=False, metadata={"check": lambda name, log: check_kind(name, log, bool)})

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            text = (
                f"low={self.low:g} must be below high={self.high:g}: a column is scaled by its bounds."
            )
            raise InvalidValue(text, key="low")

    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        return self.scale(numbers(f"column {name!r}", values))[:, None]

    def scale(self, values: Array) -> Array:
        """Clamp values to the bounds and map them to [-1, 1], element by element."""
        above = np.clip(values, self.low, self.high) - self.low
        width = self.high - self.low
        share = np.log1p(above) / np.log1p(width) if self.log else above / width
        return np.clip(2.0 * share - 1.0, -1.0, 1.0)

    def unscale(self, scaled: Array) -> Array:
        """Inverse of `scale`, for values clamped to [-1, 1]."""
        share = (np.clip(scaled, -1.0, 1.0) + 1.0) / 2.0
        width = self.high - self.low
        above = np.expm1(share * np.log1p(width)) if self.log else share * width
        return np.clip(self.low + above, self.low, self.high)


@dataclass(frozen=True, kw_only=True)
class Categorical(Column):
    """Categorical column with a public list of values, encoded one-hot.

    Args:
        values: Every value that may occur, present in the records or not. Include a value for "unknown"
            if records may lack one.
    """

    values: Sequence[Hashable] = field(
        metadata={"check": lambda name, values: distinct(name, values, ("red", "green"))}
    )

    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        return np.eye(len(self.values))[indices(values, self.values, f"column {name!r}", "schema")]


Schema = Numeric | Mapping[str, Column] | Sequence[Column]
"""One `Numeric` for all columns, a column for each name, or a column for each position."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """Encoded columns of a table in [-1, 1]."""

    numeric: Array
    categorical: Array
    """One-hot columns."""
    categories: int
    """Number of categorical columns, which is also the number of ones in each row of `categorical`."""


def encode(table: Any, schema: Schema | None) -> Encoded:
    """Encode each record of a matrix, or of a data frame by name, independently by the public schema."""
    names = getattr(table, "columns", None)
    if names is not None and isinstance(schema, Mapping):
        declared = _declared_columns(schema, len(names))
        missing = [name for name in declared if name not in names]
        outside = [name for name in names if name not in declared]
        if missing or outside:
            raise DataError(
                f"X lacks columns {short_repr(missing)} of the schema, and has columns "
                f"{short_repr(outside)} outside the schema: an undeclared column has no bounds and no "
                "public categories. Declare it in schema=, or drop it from X."
            )
        cells = [np.asarray(table[name]) for name in declared]
    else:
        # check_array's own errors about dimensions and types show private cells
        matrix = check_array(table, dtype=None, ensure_all_finite=False, ensure_2d=False)
        if matrix.ndim != 2:
            raise DataError(
                f"X has {matrix.ndim} dimensions instead of two. Reshape your data: X.reshape(-1, 1) "
                "has one column, X.reshape(1, -1) one record."
            )
        declared, cells = _declared_columns(schema, matrix.shape[1]), list(matrix.T)
        if len(declared) != len(cells):
            raise DataError(
                f"X has {len(cells)} columns and the schema declares {len(declared)}: an undeclared "
                "column has no bounds and no public categories. Declare the columns of X in their order."
            )
    rows = len(cells[0])
    parts: tuple[list[Array], list[Array]] = [np.zeros((rows, 0))], [np.zeros((rows, 0))]
    for (name, column), values in zip(declared.items(), cells, strict=True):
        parts[isinstance(column, Categorical)].append(column.encode(name, values))
    return Encoded(np.hstack(parts[0]), np.hstack(parts[1]), len(parts[1]) - 1)


def _declared_columns(schema: Schema | None, width: int) -> dict[str, Column]:
    """Columns of a schema by name. Those without a name are called x0, x1, ..."""
    columns: Any = [schema] * width if isinstance(schema, Numeric) else schema
    if isinstance(columns, Sequence):
        columns = {f"x{place}": column for place, column in enumerate(columns)}
    known = columns.values() if isinstance(columns, Mapping) else ()
    if known and all(isinstance(column, Column) for column in known):
        return dict(columns)
    text = (
        f"schema={short_repr(schema)} must declare every column: bounds and categories taken from the "
    )
    text += 'records are not private. Pass e.g. schema={"age": Numeric(low=0, high=100), "sex": '
    text += 'Categorical(values=("female", "male"))}, or one Numeric for all columns.'
    raise InvalidValue(text, key="schema")


def distinct(name: str, values: object, example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The declared values as a tuple, verified to contain at least two different ones."""
    listed: Any = values.tolist() if isinstance(values, np.ndarray) else values
    try:
        known = () if isinstance(listed, str | bytes) else tuple(listed)
        several = len(set(known)) == len(known) >= 2
    except TypeError:
        several = False
    if not several:
        text = f"{name}={short_repr(values)} must be a list of at least two different values: one taken "
        text += f"from the records would reveal which values occur. Pass e.g. {name}={example!r}."
        raise InvalidValue(text, key=name)
    return known


def indices(
    values: npt.NDArray[Any], known: Sequence[Any], what: str, declared: str
) -> npt.NDArray[np.int64]:
    """Position of each value in a public list. The error for an unknown value does not show it."""
    places = {value: place for place, value in enumerate(known)}
    try:
        return np.fromiter((places[value] for value in values.tolist()), np.int64, len(values))
    except (KeyError, TypeError):
        raise DataError(
            f"{what} holds a value that is not declared in {declared}= (it is private and not shown): "
            f"{short_repr(tuple(known))}. Declare it, or map it to a declared one, record by record."
        ) from None


def numbers(name: str, values: npt.NDArray[Any]) -> Array:
    """Finite values of a column as floats. The error for any other value does not show it."""
    try:
        converted = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        converted = np.full(1, np.nan)
    if not np.isfinite(converted).all():
        raise DataError(
            f"{name} holds NaN, infinity or a value that is not a number (it is private and not shown). "
            "Fill in or drop such records, each independently of the others."
        )
    return converted
