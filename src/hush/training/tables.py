"""Tables in files, read by row: CSV, JSON lines, Parquet, NumPy archives and folders of images."""

import csv
import json
import math
import tempfile
import zipfile
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hush.core.errors import DataError, Unsupported, short_repr
from hush.schema import Categorical, Column, Ignored, Image, Numeric, missing_in, numbers

Cells = dict[str, npt.NDArray[Any]]
_AT_ONCE = 4096
_FEW = 50
"""Maximum number of distinct values of a column that a draft schema declares as categories."""
_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"}


class Table(ABC):
    """Table with named columns, whose rows can be read by number."""

    names: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def cells(self, slots: Sequence[int]) -> Cells:
        """Read rows, as arrays by column name."""

    def parts(self) -> Iterator[Cells]:
        """Read all rows, in parts."""
        return map(self.cells, parts_of(len(self)))


class TextTable(Table):
    """CSV file with a heading, or JSON lines, in UTF-8.

    The constructor stores the offsets of all rows in a temporary file. Afterwards, only the requested
    rows are read, so neither the file nor its index is in memory.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._json = path, path.suffix.lower() != ".csv"
        with path.open("rb") as file:
            heading = file.readline().decode("utf-8-sig", "replace")
            file.seek(0)
            delimiter = max(",;\t|", key=heading.count)
            self._reader = partial(csv.reader, delimiter=delimiter, skipinitialspace=True, strict=True)
            try:
                self._offsets = self._index(file)
            except UnicodeDecodeError:
                raise DataError(f"{path} is not in UTF-8. Convert it: iconv -t utf-8.") from None
        if len(set(self.names)) < len(self.names):
            raise DataError(f"{path} has two columns with the same name: {short_repr(self.names)}.")

    def __len__(self) -> int:
        return len(self._offsets)

    def cells(self, slots: Sequence[int]) -> Cells:
        texts = []
        with self._path.open("rb") as file:
            for start, end in self._offsets[list(slots)].tolist():
                file.seek(start)
                texts.append(file.read(end - start).decode("utf-8-sig"))
        if not self._json:
            return dict(
                zip(self.names, map(_column, zip(*self._reader(texts), strict=True)), strict=True)
            )
        rows = [json.loads(text) for text in texts]
        return {name: _column([row.get(name) for row in rows]) for name in self.names}

    def _index(self, file: Any) -> npt.NDArray[np.int64]:
        """Start and end of each row; raise unless every row has the columns of the first row."""
        start = end = line = 0

        def lines() -> Iterator[str]:
            nonlocal end, line
            for line, content in enumerate(file, start=1):
                end += len(content)
                yield content.decode("utf-8" if line > 1 else "utf-8-sig")

        rows = map(_keys, lines()) if self._json else self._reader(lines())
        found = array("q")
        with tempfile.TemporaryFile() as index:
            try:
                for number, row in enumerate(rows, start=1):
                    if number == 1:
                        self.names = [name.strip() for name in row]
                    elif row and (
                        set(row) - {*self.names} if self._json else len(row) != len(self.names)
                    ):
                        raise ValueError(f"has other columns than {short_repr(self.names)}")
                    if row and (self._json or number > 1):
                        found.extend((start, end))
                    start = end
                    if len(found) > 2**16:
                        found.tofile(index)
                        del found[:]
            except (csv.Error, json.JSONDecodeError, ValueError) as error:
                if isinstance(error, UnicodeDecodeError):
                    raise
                raise DataError(
                    f"{self._path}, line {line}: {error}. A CSV file needs a heading, and quotes around "
                    "cells with commas or line breaks; JSON lines need objects with the same keys."
                ) from None
            found.tofile(index)
            index.flush()
            if not index.tell():
                raise DataError(f"{self._path} has no records. A CSV file begins with the column names.")
            return np.memmap(index, np.int64, "r", shape=(index.tell() // 16, 2))


class ArrayTable(Table):
    """Table of a data frame or of a NumPy archive, in memory."""

    def __init__(self, columns: Mapping[str, npt.NDArray[Any]], what: str) -> None:
        self._columns, self.names = columns, list(map(str, columns))
        lengths = {len(cells) if cells.ndim else 0 for cells in columns.values()}
        if len(lengths) != 1 or 0 in lengths:
            raise DataError(
                f"{what} has columns with {sorted(lengths)} rows. Store one row per record in each."
            )

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def cells(self, slots: Sequence[int]) -> Cells:
        return {str(name): cells[list(slots)] for name, cells in self._columns.items()}


class ParquetTable(Table):
    """Table of a Parquet file, mapped into memory by pyarrow."""

    def __init__(self, path: Path) -> None:
        try:
            import pyarrow.parquet
        except ImportError:
            raise Unsupported(f"{path}: Parquet needs pyarrow. Run `pip install pyarrow`.") from None
        try:
            self._table = pyarrow.parquet.read_table(path, memory_map=True)
        except (OSError, ValueError, pyarrow.ArrowException) as error:
            raise DataError(f"{path} is not a readable Parquet file ({error}).") from None
        self.names = list(self._table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def cells(self, slots: Sequence[int]) -> Cells:
        return {name: _column(v) for name, v in self._table.take(list(slots)).to_pydict().items()}


def open_table(data: Any) -> Table:
    """Open a table: a data frame, or the path of a file or of a folder of images by class."""
    if isinstance(data, Table):
        return data
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        return ArrayTable({str(name): np.asarray(data[name]) for name in data.columns}, "the data frame")
    path = Path(data)
    if not path.exists():
        raise DataError(f"{path} does not exist. Pass a file, or a folder with one folder per class.")
    if path.is_dir():
        files = sorted(each for each in path.glob("*/*") if each.suffix.lower() in _IMAGES)
        if not files:
            raise DataError(f"{path} has no images in folders named by class, such as {path}/cat/1.png.")
        classes = _column([each.parent.name for each in files])
        return ArrayTable({"image": _column(files), "class": classes}, str(path))
    kinds: dict[str, Callable[[Path], Table]] = {
        **dict.fromkeys((".csv", ".jsonl", ".ndjson"), TextTable),
        ".parquet": ParquetTable,
        ".npz": _archive,
    }
    if path.suffix.lower() not in kinds:
        raise DataError(f"{path} must be a folder of images or a file {', '.join(kinds)}.")
    return kinds[path.suffix.lower()](path)


@dataclass(frozen=True, eq=False)
class EncodedTable:
    """Inputs and targets from a table, encoded by a public schema when they are read.

    **Guarantee.** Each cell is encoded separately, so a row depends only on one record and the schema.

    Args:
        table: Table with exactly the columns of the schema.
        schema: Declaration of each column.
        targets: Names of the target columns.
        new: Whether the records are for prediction. Then the table may lack the targets and have other
            columns.
    """

    table: Table
    schema: Mapping[str, Column]
    targets: Sequence[str]
    new: bool = False

    def __post_init__(self) -> None:
        known = ", ".join(self.table.names)
        for name in self.targets:
            if name not in self.schema:
                raise DataError(
                    f"the schema has no target column {name!r}: it has {', '.join(self.schema)}."
                )
            if self.labelled and name not in self.table.names:
                raise DataError(f"the data has no target column {name!r}: its columns are {known}.")
        used = [*self.inputs, *(self.targets if self.labelled else ())]
        lacks = [name for name in used if name not in self.table.names]
        strange = [name for name in self.table.names if name not in self.schema and not self.new]
        if lacks:
            raise DataError(
                f"the data lacks the columns {short_repr(lacks)} of the schema: its columns are "
                f"{known}. Pass a file with them, or declare the schema without them."
            )
        if strange:
            raise DataError(
                f"the data has the columns {short_repr(strange)} that the schema does not know: they "
                'have no public bounds or categories. Declare them, with kind = "Ignored" for a column '
                "that is not used."
            )
        if not self.inputs:
            raise DataError("the schema declares no input column besides the targets.")
        kinds = [self.schema[name] for name in self.targets]
        binary = all(isinstance(each, Categorical) and len(each.values) == 2 for each in kinds)
        if not (self.classes or binary or self.numeric):
            raise DataError(
                f"the targets {', '.join(self.targets)} must be one Categorical column, several "
                "Categorical columns of two values (labels), or Numeric columns (regression)."
            )
        if len(self) < (self.classes or 0) and not self.new:
            raise DataError(
                f"the data has {len(self)} rows and the schema declares {self.classes} classes. Pass "
                "at least one record per class, or declare fewer classes."
            )

    @cached_property
    def labelled(self) -> bool:
        """Whether the table has the target columns."""
        return not self.new or all(name in self.table.names for name in self.targets)

    @cached_property
    def inputs(self) -> list[str]:
        """Names of the input columns."""
        used = {name for name, each in self.schema.items() if not isinstance(each, Ignored)}
        return [name for name in self.schema if name in used and name not in self.targets]

    @property
    def numeric(self) -> bool:
        """Whether the targets are numbers, and not classes or several labels."""
        return all(isinstance(self.schema[name], Numeric) for name in self.targets)

    @property
    def outputs(self) -> int:
        """Number of model outputs: one per class, label or number."""
        return self.classes or len(self.targets)

    @property
    def classes(self) -> int | None:
        """Number of classes of a single categorical target; None for numbers or several labels."""
        first = self.schema[self.targets[0]] if len(self.targets) == 1 else None
        return len(first.values) if isinstance(first, Categorical) else None

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, slot: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.rows([slot])
        return inputs[0], targets[0]

    def rows(self, slots: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs and targets of these rows."""
        cells = self.table.cells(slots)
        parts = [self.schema[name].encode(name, cells[name]) for name in self.inputs]
        if len(parts) > 1 or parts[0].ndim < 3:
            parts = [np.hstack([part.reshape(len(part), -1) for part in parts])]
        rows = parts[0][:, None] if parts[0].ndim == 3 else parts[0]  # grey images
        return torch.from_numpy(rows).to(torch.float32), self._targets(cells, len(rows))

    def whole(self) -> tuple[Tensor, Tensor]:
        """Read inputs and targets of all rows into memory."""
        inputs, targets = zip(*map(self.rows, parts_of(len(self))), strict=True)
        return torch.cat(inputs), torch.cat(targets)

    def _targets(self, cells: Cells, rows: int) -> Tensor:
        if not self.labelled:
            return torch.zeros(rows, 0)
        columns: list[npt.NDArray[Any]] = []
        for name in self.targets:
            column, what = self.schema[name], f"target column {name!r}"
            if isinstance(column, Categorical):
                columns.append(column.places(what, cells[name]))
            elif isinstance(column, Numeric):
                columns.append(column.scale(numbers(what, cells[name])))
        stacked = torch.from_numpy(np.stack(columns, 1))
        return stacked[:, 0].clone() if self.classes else stacked.float()


def parts_of(rows: int) -> Iterator[range]:
    """Row numbers of all rows, in parts."""
    return (range(start, min(start + _AT_ONCE, rows)) for start in range(0, rows, _AT_ONCE))


def draft_schema(table: Table, targets: Sequence[str] = ()) -> dict[str, Column]:
    """Draft a schema with the bounds and categories that occur in the records.

    The draft is not private. Use it only for public records, or replace its values by public knowledge.
    """
    found = {name: _Seen() for name in table.names}
    for cells in table.parts():
        for name, seen in found.items():
            seen.add(cells[name])
    for name in targets:
        if name not in found:
            known = ", ".join(table.names)
            raise DataError(f"the data has no target column {name!r}: its columns are {known}.")
        if len(found[name].values) < 2:
            raise DataError(
                f"the target column {name!r} has only one value. Classes must be public and come from "
                "the schema, not from the records: draft the schema from records of every class."
            )
    return {name: seen.column(target=name in targets) for name, seen in found.items()}


class _Seen:
    """Summary of the values of a column, for a draft schema."""

    def __init__(self) -> None:
        self.values: dict[Any, None] = {}
        self.low, self.high = math.inf, -math.inf
        self.numeric, self.missing = True, False
        self.image: Path | None = None

    def add(self, cells: npt.NDArray[Any]) -> None:
        if cells.dtype == object and isinstance(cells[0], Path):
            self.image = self.image or cells[0]
            return
        absent = missing_in(cells)
        self.missing |= bool(absent.any())
        present = cells[~absent]
        if len(self.values) <= _FEW:
            words = [
                each.strip() if isinstance(each, str) else each for each in present.ravel().tolist()
            ]
            self.values |= dict.fromkeys(words)
        try:
            read = numbers("", present) if self.numeric and present.size else np.zeros(0)
            self.low, self.high = min([self.low, *read.flat]), max([self.high, *read.flat])
        except DataError:
            self.numeric = False

    def column(self, *, target: bool) -> Column:
        if self.image is not None:
            from PIL import Image as Images

            with Images.open(self.image) as first:
                channels = 1 if first.mode in ("1", "L") else 3
                return Image(height=first.height, width=first.width, channels=channels)
        whole = all(float(value).is_integer() for value in self.values) if self.numeric else False
        if self.values and self.numeric and not (target and whole and len(self.values) <= _FEW):
            low, high = _outward(self.low, math.floor), _outward(self.high, math.ceil)
            low = 0.0 if 0 <= low < high / 2 else low
            log, middle = low == 0 and high >= 10_000, (low + high) / 2
            low = low - 1 if low == high else low
            return Numeric(low=low, high=high, log=log, missing=middle if self.missing else None)
        if not self.values or len(self.values) > _FEW:
            return Ignored()
        values = sorted(self.values, key=str)
        if target:
            return Categorical(values=values)
        return Categorical(values=[*values, *({"other"} - {*values})], unseen="other")


def _outward(number: float, rounded: Callable[[float], int]) -> float:
    """Round a bound outwards to one significant digit."""
    unit = 10.0 ** math.floor(math.log10(abs(number))) if number else 1.0
    return rounded(number / unit) * unit


def _archive(path: Path) -> Table:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            content = dict(arrays)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is not an archive of numeric arrays ({error}).") from None
    return ArrayTable(content, str(path))


def _column(cells: Sequence[Any]) -> npt.NDArray[Any]:
    values = np.empty(len(cells), object)
    values[:] = cells
    return values


def _keys(line: str) -> list[str]:
    """Column names of a line of JSON."""
    row = json.loads(line) if line.strip() else {}
    if not isinstance(row, dict):
        raise ValueError("is not an object")
    return list(row)
