"""Inputs and targets from records with named columns: dictionaries and rows of a table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hush.core.errors import DataError
from hush.training.sources.records import TableRecords, tensor_of

Columns = str | list[str] | dict[str, Any] | Callable[[Any], Any] | None
"""Which columns: the name of one, a list of them (one vector of numbers), a dictionary of arguments by
name, or a function of the record."""


def columns_of_record(record: Mapping[str, Any], inputs: Columns, targets: Columns) -> tuple[Any, Any]:
    """Inputs and targets of one record, a row each.

    Args:
        record: values by column.
        inputs: None: all columns but those of the targets, as arguments by name.
        targets: needed, as which column is to be predicted cannot be told from the record.
    """

    def column(name: str) -> Tensor:
        return _number(name, record[name]).unsqueeze(0)

    def of(columns: Columns) -> Any:
        return _row_of(columns(record)) if callable(columns) else pick(columns, column, record)

    return of(inputs_beside(inputs, targets, record)), of(targets)


def columns_of_table(
    table: TableRecords, slots: Sequence[int], inputs: Columns, targets: Columns
) -> tuple[Any, Any]:
    """Inputs and targets of some rows, all at once: of columns that are named, not of functions."""

    def column(name: str) -> Tensor:
        return _number(name, table.column(name, slots))

    names = table.names
    chosen = inputs_beside(inputs, targets, names)
    return pick(chosen, column, names), pick(targets, column, names)


def columns_of_collated(rows: Mapping[str, Any], inputs: Columns, targets: Columns) -> tuple[Any, Any]:
    """Inputs and targets from what a collate function made: tensors by name, with a row a record."""

    def column(name: str) -> Any:
        return rows[name]

    def of(columns: Columns) -> Any:
        return columns(rows) if callable(columns) else pick(columns, column, rows)

    return of(inputs_beside(inputs, targets, rows)), of(targets)


def inputs_beside(inputs: Columns, targets: Columns, names: Iterable[str]) -> Columns:
    """The columns of the inputs; where none are named, all that the targets do not take."""
    if targets is None:
        raise DataError(
            f"a record has the columns {', '.join(map(str, names))}, and nothing says which of them is "
            'to be predicted. Pass hush.Source(data, inputs=["age", "hours"], targets="income") with '
            "names of columns, or a collate_fn that returns (inputs, targets)."
        )
    if inputs is not None:
        return inputs
    taken = set() if callable(targets) else names_in(targets)
    _check_named(taken, names)  # before a column that is no target after all is read as an input
    return {name: name for name in names if name not in taken}


def names_in(columns: Any) -> set[str]:
    """Names of the columns that are asked for."""
    if isinstance(columns, str):
        return {columns}
    parts = columns.values() if isinstance(columns, dict) else columns
    return {name for part in parts for name in names_in(part)}


def pick(columns: Any, column: Callable[[str], Any], names: Iterable[str]) -> Any:
    """The columns that are asked for, each read by a function of its name."""
    if isinstance(columns, dict):
        return {key: pick(part, column, names) for key, part in columns.items()}
    _check_named(names_in(columns), names)
    if isinstance(columns, str):
        return column(columns)
    parts = [column(name) for name in columns]
    for name, part in zip(columns, parts, strict=True):
        if part.dim() != 1:
            raise DataError(
                f"column {name!r} holds several numbers a record, and a list of columns makes one "
                "vector of one number each. Pass a dictionary of arguments by name, "
                f"e.g. inputs={{{name!r}: {name!r}}}."
            )
    return torch.stack([part.to(torch.get_default_dtype()) for part in parts], 1)


def _check_named(chosen: set[str], names: Iterable[str]) -> None:
    """Raise for a column that the data has not."""
    missing = chosen - set(names)
    if missing:
        raise DataError(
            f"there is no column {', '.join(sorted(map(repr, missing)))}; the columns are "
            f"{', '.join(map(str, names))}. Name columns that the data has."
        )


def _number(name: str, value: Any) -> Tensor:
    """Numbers of a column: integers and yes or no as they are, others in torch's default precision."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"column {name!r} does not hold a number, or numbers, in every record: words, dates and "
            "missing values have to become numbers by a rule that does not look at the records (a "
            "category's number among those that are present tells who is there). Encode the column by a "
            "public list, leave it out, or pass a function of the record."
        )
    tensor = tensor_of(array)
    if array.dtype.kind == "f":
        return tensor.to(torch.get_default_dtype())
    return tensor if array.dtype.kind == "b" else tensor.long()


def _row_of(value: Any) -> Any:
    """What a function of a record returned, with a first dimension of one."""
    if isinstance(value, tuple):
        return tuple(_row_of(part) for part in value)
    if isinstance(value, dict):
        return {key: _row_of(part) for key, part in value.items()}
    return _number("of a function", value).unsqueeze(0)
