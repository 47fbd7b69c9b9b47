"""Public schema of a table: bounds and categories that are declared, not learned from the records.

`hush.Source`, the scikit-learn estimators and `hush train --schema` use the same schema.
"""

import json
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from hush.core.errors import DataError, HushError, InvalidValue, short_repr
from hush.core.value import Value, check_kind, count, number

Array = npt.NDArray[np.float64]

_WHY = "values are clamped to the declared bounds to limit the influence of one record"
_BOUND = number(at_least=-1e12, at_most=1e12, why=_WHY, example=100.0)
_FLAG: Mapping[str, Any] = {"check": lambda name, value: check_kind(name, value, bool)}
_MISSING = {"", "?", "na", "n/a", "nan", "none", "null"}
"""Strings for a missing value, in lower case, unless they are declared categories."""


@dataclass(frozen=True, kw_only=True)
class Column(Value, ABC):
    """Declaration of one column, which must not depend on the values in the records."""

    kinds: ClassVar[dict[str, type["Column"]]] = {}

    def __init_subclass__(cls) -> None:
        Column.kinds[cls.__name__] = cls

    @abstractmethod
    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        """Features in [-1, 1], one row per record. Each record is encoded independently."""

    def to_plain(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, **super().to_plain()}


@dataclass(frozen=True, kw_only=True)
class Numeric(Column):
    """Numeric column or target with public bounds. Values outside the bounds are clamped.

    Args:
        low: Lower bound.
        high: Upper bound.
        log: Whether to use a logarithmic scale from `low`, for columns that span orders of magnitude.
        missing: Public number that replaces missing values. A second feature is 1 for a missing value
            and 0 otherwise.
    """

    low: float = field(metadata=_BOUND)
    high: float = field(metadata=_BOUND)
    log: bool = field(default=False, metadata=_FLAG)
    missing: float | None = field(default=None, metadata=_BOUND)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.low < self.high:
            text = (
                f"low={self.low:g} must be below high={self.high:g}: a column is scaled by its bounds."
            )
            raise InvalidValue(text, key="low")

    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        if self.missing is not None:
            absent, filled = missing_in(values), values.astype(object)
            filled[absent] = self.missing
            scaled = self.scale(numbers(f"column {name!r}", filled))
            return np.stack([scaled, absent], 1).reshape(len(values), -1)
        scaled = self.scale(numbers(f"column {name!r}", values))
        return scaled[:, None] if scaled.ndim == 1 else scaled

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
        values: All values that may occur, whether or not they are present in the records. Include a
            value such as "unknown" if values may be missing.
        unseen: Declared value that replaces undeclared values.
        missing: Declared value that replaces missing values; by default `unseen`.
    """

    values: Sequence[Hashable] = field(
        metadata={"check": lambda name, values: distinct(name, values, ("red", "green"))}
    )
    unseen: Hashable = None
    missing: Hashable = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("unseen", "missing"):
            if getattr(self, name) is not None and getattr(self, name) not in self.values:
                text = f"{name}={short_repr(getattr(self, name))} must be one of the declared values."
                raise InvalidValue(text, key=name)

    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        return np.eye(len(self.values))[self.places(f"column {name!r}", values)]

    def places(self, what: str, values: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Position of each value in `values`."""
        return indices(values, self.values, what, "schema", self.missing, self.unseen)


@dataclass(frozen=True, kw_only=True)
class Image(Column):
    """Image files, resized to a public size, with pixels in [-1, 1].

    Args:
        height: Height in pixels.
        width: Width in pixels.
        channels: 1 for greyscale, 3 for colour.
    """

    height: int = field(metadata=count("every record has the same shape", at_most=4096, example=32))
    width: int = field(metadata=count("every record has the same shape", at_most=4096, example=32))
    channels: int = field(default=3, metadata=count("images are grey or RGB", at_most=3, example=3))

    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        from PIL import Image as Images

        rows = np.empty((len(values), self.channels, self.height, self.width))
        for row, path in zip(rows, values.tolist(), strict=True):
            try:
                with Images.open(path) as opened:
                    image = opened.convert("L" if self.channels == 1 else "RGB")
                    pixels = np.asarray(image.resize((self.width, self.height)), np.float64)
            except (OSError, ValueError, Images.DecompressionBombError):
                raise DataError(f"{path} is not a readable image. Repair or remove it.") from None
            row[:] = np.atleast_3d(pixels).transpose(2, 0, 1) / 127.5 - 1.0
        return rows


@dataclass(frozen=True, kw_only=True)
class Ignored(Column):
    """Column that is not used, e.g. an identifier or free text."""

    def encode(self, name: str, values: npt.NDArray[Any]) -> Array:
        return np.zeros((len(values), 0))


Schema = Numeric | Mapping[str, Column] | Sequence[Column]
"""One `Numeric` for all columns, or columns by name or by position."""


@dataclass(frozen=True, eq=False)
class Encoded:
    """Encoded columns of a table in [-1, 1]."""

    numeric: Array
    categorical: Array
    """One-hot columns."""
    categories: int
    """Number of categorical columns; each row of `categorical` contains this number of ones."""

    @property
    def features(self) -> Array:
        """All encoded columns, one row per record."""
        return np.hstack([self.numeric, self.categorical])


def encode(table: Any, schema: Schema | None) -> Encoded:
    """Encode each record of a matrix or data frame independently with a public schema.

    Columns of a data frame are matched by name.
    """
    names = getattr(table, "columns", None)
    if names is not None and isinstance(schema, Mapping):
        declared = _declared_columns(schema, len(names))
        missing = [name for name in declared if name not in names]
        outside = [name for name in names if name not in declared]
        if missing or outside:
            raise DataError(
                f"X lacks columns {short_repr(missing)} of the schema, and has columns "
                f"{short_repr(outside)} outside the schema: an undeclared column has no bounds and no "
                "public categories. Declare the columns in schema=, or drop them from X."
            )
        cells = [np.asarray(table[name]) for name in declared]
    else:
        from sklearn.utils import check_array

        # check_array's own errors about dimensions and types show private values
        matrix = check_array(table, dtype=None, ensure_all_finite=False, ensure_2d=False)
        if matrix.ndim != 2:
            raise DataError(
                f"X has {matrix.ndim} dimensions instead of two. Reshape your data: X.reshape(-1, 1) "
                "for a single column, X.reshape(1, -1) for a single record."
            )
        declared, cells = _declared_columns(schema, matrix.shape[1]), list(matrix.T)
        if len(declared) != len(cells):
            raise DataError(
                f"X has {len(cells)} columns and the schema declares {len(declared)}: an undeclared "
                "column has no bounds and no public categories. Declare all columns of X in order."
            )
    rows = len(cells[0])
    parts: tuple[list[Array], list[Array]] = [np.zeros((rows, 0))], [np.zeros((rows, 0))]
    for (name, column), values in zip(declared.items(), cells, strict=True):
        features = column.encode(name, values).reshape(rows, -1)
        parts[isinstance(column, Categorical)].append(features)
    return Encoded(np.hstack(parts[0]), np.hstack(parts[1]), len(parts[1]) - 1)


def _declared_columns(schema: Schema | None, width: int) -> dict[str, Column]:
    """Columns of a schema by name; unnamed columns are called x0, x1, ..."""
    columns: Any = [schema] * width if isinstance(schema, Numeric) else schema
    if isinstance(columns, Sequence):
        columns = {f"x{place}": column for place, column in enumerate(columns)}
    known = columns.values() if isinstance(columns, Mapping) else ()
    if known and all(isinstance(column, Column) for column in known):
        return dict(columns)
    text = (
        f"schema={short_repr(schema)} must declare every column: bounds and categories taken from the "
    )
    text += 'records would not be private. Pass e.g. schema={"age": Numeric(low=0, high=100), "sex": '
    text += 'Categorical(values=("female", "male"))}, or one Numeric for all columns.'
    raise InvalidValue(text, key="schema")


def distinct(name: str, values: object, example: tuple[Any, ...]) -> tuple[Any, ...]:
    """Validate at least two different declared values, and return them as a tuple."""
    listed: Any = values.tolist() if isinstance(values, np.ndarray) else values
    try:
        known = () if isinstance(listed, str | bytes) else tuple(listed)
        several = len(set(known)) == len(known) >= 2
    except TypeError:
        several = False
    if not several:
        text = f"{name}={short_repr(values)} must be a list of at least two different values: a list "
        text += f"taken from the records would reveal which values occur. Pass e.g. {name}={example!r}."
        raise InvalidValue(text, key=name)
    return known


def indices(
    values: npt.NDArray[Any],
    known: Sequence[Any],
    what: str,
    declared: str,
    missing: Hashable = None,
    unseen: Hashable = None,
) -> npt.NDArray[np.int64]:
    """Position of each value in a public list; a value also matches its string representation.

    Missing and unknown values get the positions of `missing` and `unseen`. Errors do not show values.
    """
    places: dict[Hashable, int] = {str(value).strip(): place for place, value in enumerate(known)}
    places |= {value: place for place, value in enumerate(known)}
    substitute = unseen if missing is None else missing

    def place(value: Any) -> int:
        try:
            return places[value]
        except (KeyError, TypeError):
            text = str(value).strip()
        if text in places and isinstance(value, str | int | np.generic):
            return places[text]
        absent = _is_missing(value)
        if (other := substitute if absent else unseen) is not None:
            return places[other]
        lack = "lacks a value (missing)" if absent else "holds a value"
        way = " For a declared substitute, pass Categorical(missing=) or Categorical(unseen=)."
        raise DataError(
            f"{what} {lack} that is not declared in {declared}= (it is private and not shown): "
            f"{short_repr(tuple(known))}. Declare it, or map it to a declared one, record by record."
            + way
            * (declared == "schema")
        ) from None

    return np.fromiter(map(place, values.tolist()), np.int64, len(values))


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip().lower() in _MISSING
    return (
        value is None
        or value is np.ma.masked
        or type(value).__name__ in ("NAType", "NaTType")
        or (isinstance(value, float) and value != value)
    )


def missing_in(values: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Mask of the missing values: None, NaN, and strings such as "", "NA" and "?"."""
    if values.dtype.kind in "biufc":
        return np.asarray(np.isnan(values))
    absent = [_is_missing(value) for value in values.ravel().tolist()]
    return np.asarray(absent, np.bool_).reshape(values.shape)


def numbers(name: str, values: npt.NDArray[Any]) -> Array:
    """Convert a column to finite floats. Errors do not show the invalid value, which is private."""
    try:
        converted = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        converted = np.full(1, np.nan)
    if not np.isfinite(converted).all():
        if missing_in(np.asarray(values)).any():
            way = "Drop such records, each independently of the others."
            if name.startswith("column"):
                way = "Declare Numeric(missing=NUMBER) to replace them with a public number and to mark "
                way += "them with a second feature."
            raise DataError(f"{name} has missing values (NaN, None or empty). {way}")
        raise DataError(
            f"{name} contains infinity or a value that is not a number (it is private and not shown). "
            "Correct or drop such records, each independently of the others."
        )
    return converted


def schema_of(plain: Mapping[str, Any]) -> dict[str, Column]:
    """Schema from plain data: one table per column, with a `kind`."""
    columns = {}
    for name, settings in plain.items():
        own = dict(settings) if isinstance(settings, Mapping) else {}
        kind = Column.kinds.get(str(own.pop("kind", None)))
        if kind is None:
            kinds = ", ".join(Column.kinds)
            raise InvalidValue(f'column {name!r} needs a kind: {kinds}. Write e.g. kind = "Numeric".')
        try:
            columns[name] = kind.from_plain(own)
        except HushError as error:
            raise InvalidValue(f"column {name!r}: {error}", key=error.key) from None
    if not columns:
        raise InvalidValue("the schema declares no column. `hush schema FILE` drafts one.")
    return columns


def read_schema(path: str | Path) -> dict[str, Column]:
    """Read a schema file (TOML).

    Args:
        path: File with one table per column, e.g. from `hush schema`.
    """
    try:
        return schema_of(tomllib.loads(Path(path).read_text(encoding="utf-8-sig")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidValue(
            f"the schema {path} cannot be read ({error}). `hush schema FILE > schema.toml` drafts one."
        ) from None
    except HushError as error:
        raise InvalidValue(f"{path}, {error}", key=error.key) from None


def schema_text(schema: Mapping[str, Column]) -> str:
    """Schema as TOML text for `read_schema`."""

    def text(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False)

    tables = []
    for name, column in schema.items():
        lines = [f"{key} = {text(value)}" for key, value in column.to_plain().items()]
        tables.append("\n".join([f"[{text(name)}]", *lines, ""]))
    return "\n".join(tables)
