"""Numbered records of a data set, arrays or a table, and the columns that make inputs and targets."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from hush.core.errors import DataError
from hush.core.value import with_article

Columns = str | list[str] | dict[str, Any] | Callable[[Any], Any] | None
"""Columns to read: a name, a list of names (one vector of numbers), a dictionary of arguments by name,
or a function of the record."""

_ONE_SHAPE = (
    "the records of a batch are processed together, in one tensor. Pad them to one public length "
    "(torch.nn.utils.rnn.pad_sequence, with a mask as another input), or pass a data set of them."
)


@runtime_checkable
class MapStyle(Protocol):
    """Data set whose records have numbers: item i is record i, whatever was read before."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class ArrayRecords:
    """Rows of tensors or arrays; of memory-mapped arrays only the requested rows are read."""

    inputs: Any
    targets: Any
    order: npt.NDArray[np.int64] | None = None
    """Row of each slot; None: slot i is row i."""

    def __post_init__(self) -> None:
        for part in leaves((self.inputs, self.targets)):
            if isinstance(part, np.ndarray) and part.dtype.kind not in "biufc":
                raise DataError(
                    f"an array of type {part.dtype} holds no numbers. Turn it into numbers by a rule "
                    "that does not depend on the records."
                )
        check_lengths(self.inputs, self.targets)

    def __len__(self) -> int:
        return len(next(leaves(self.inputs)) if self.order is None else self.order)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        inputs, targets = self.rows([index])
        return map_leaves(inputs, lambda rows: rows[0]), map_leaves(targets, lambda rows: rows[0])

    def rows(self, slots: Sequence[int]) -> tuple[Any, Any]:
        """Inputs and targets of some slots, a row each."""
        chosen = np.asarray(slots, dtype=np.int64)
        if self.order is not None:
            chosen = self.order[chosen]

        def read(rows: Any) -> Tensor:
            if isinstance(rows, Tensor):
                return rows[torch.from_numpy(chosen).to(rows.device)]
            return tensor_of(np.asarray(rows[chosen]))

        return map_leaves(self.inputs, read), map_leaves(self.targets, read)


@dataclass(frozen=True, eq=False)
class TableRecords:
    """Rows of a pandas DataFrame by position; the index is ignored."""

    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.table.iloc[[index]]
        return {name: row[name].to_numpy()[0] for name in self.names}

    @property
    def names(self) -> list[str]:
        """Names of the columns."""
        return list(self.table.columns)

    def column(self, name: str, slots: Sequence[int]) -> npt.NDArray[Any]:
        """Values of some rows in one column.

        Returns objects if the type of the values differs from the column's, as for missing integers.
        """
        column = self.table[name]
        values = np.asarray(column.iloc[list(slots)].to_numpy())
        return (
            values if values.dtype.kind == getattr(column.dtype, "kind", "O") else values.astype(object)
        )


def numbered(data: Any) -> MapStyle:
    """The data's records by number; raise if they have none."""
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(map(_numeric, data)):
        return ArrayRecords(*data)
    if isinstance(data, tuple) and len(data) == 2:
        raise _not_tensors(*data)
    if isinstance(data, dict):
        raise DataError(
            f"{with_article(type(data).__name__)} with {', '.join(map(repr, data))} has no numbered "
            "records. Pass the part with the private records, e.g. data['train'], or a pair (inputs, "
            "targets)."
        )
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        return TableRecords(data)
    if type(data) is Subset:  # as from random_split: rows are read all at once
        whole, order = base_dataset(data)
        if type(whole) is TensorDataset and len(whole.tensors) == 2:
            return ArrayRecords(*whole.tensors, np.asarray(order, np.int64))
    stream = isinstance(data, IterableDataset) or hasattr(data, "__next__")
    if stream or not isinstance(data, MapStyle) or isinstance(data, (tuple, list, Tensor)):
        raise DataError(
            f"{with_article(type(data).__name__)} has no numbered records: each step includes every "
            "record by an independent coin, and a stream has an order of its own: no sampling, no "
            "charge. Pass two tensors (inputs, targets) or a map-style data set, e.g. "
            "hush.Source(loader.dataset, collate_fn=loader.collate_fn, workers=loader.num_workers); "
            "write a stream to disk once."
        )
    return data


def _not_tensors(inputs: Any, targets: Any) -> DataError:
    """Error for a pair of inputs and targets that holds more than tensors and arrays."""
    kinds = f"{type(inputs).__name__} and {type(targets).__name__}"
    way_out = "(torch.as_tensor(inputs), torch.as_tensor(targets))"
    if isinstance(inputs, Mapping):
        listed = [repr(name) for name, part in inputs.items() if not _numeric(part)]
        kinds += f" ({', '.join(listed)} without tensors)" if listed else ""
        way_out = (
            "a tensor for each name, and one of targets: of a tokenizer "
            'tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt"), with '
            "max_length= a public number"
        )
    elif hasattr(inputs, "iloc"):
        way_out = 'one table: hush.Source(frame, inputs=["age", "hours"], targets="income")'
    return DataError(
        f"inputs and targets are of the kinds {kinds}, and gradients are taken of tensors. Pass "
        f"{way_out}."
    )


def base_dataset(data: "Subset[Any]") -> tuple[Any, list[int]]:
    """Data set that nested subsets refer to, and the numbers of their records in it."""
    base: Any = data.dataset
    indices = list(data.indices)
    while isinstance(base, Subset):
        base, indices = base.dataset, [base.indices[index] for index in indices]
    return base, indices


def check_lengths(inputs: Any, targets: Any) -> None:
    """Raise unless every tensor or array has a row for each record."""
    for part in (inputs, targets):
        others = [value for value in leaves(part) if not hasattr(value, "ndim")]
        if others:
            named = part.items() if isinstance(part, Mapping) else ()
            names = [repr(name) for name, value in named if any(value is other for other in others)]
            raise DataError(
                f"{', '.join(names) or 'part of the data'} is {with_article(type(others[0]).__name__)}, "
                "which has no row for each record. Leave it out, and set it in the model "
                "(model.config.use_cache = False), or in a forward() that passes it on."
            )
    parts = [list(leaves(part)) for part in (inputs, targets)]
    if any(getattr(rows, "is_nested", False) for rows in (*parts[0], *parts[1])):
        raise DataError(f"data with a nested tensor, of records of several lengths: {_ONE_SHAPE}")
    scalar = any(not rows.ndim for rows in (*parts[0], *parts[1]))
    counts = [[len(rows) for rows in part if rows.ndim] for part in parts]
    if not scalar and len({*counts[0], *counts[1]}) == 1:
        return
    listed = isinstance(targets, (list, tuple))
    if isinstance(inputs, (list, tuple)) and len(inputs) in ([len(targets)] if listed else counts[1]):
        # their lengths are private
        raise DataError(
            f"inputs is a {type(inputs).__name__} of {len(inputs)} tensors, one a record: {_ONE_SHAPE} "
            "If they are of one shape, pass torch.stack(inputs), and one tensor of targets."
        )
    if scalar:
        raise DataError(
            "data with a tensor of shape (): it has no rows. Pass tensors whose first dimension is the "
            "records."
        )
    raise DataError(
        f"{' and '.join(map(str, counts[0]))} inputs and {counts[1][0]} targets: each record needs one "
        "of each. Pass tensors with the same number of rows."
    )


def check_present(present: object, slots: int) -> Tensor | None:
    """`present` if it is a mask of the slots that hold a record; raise otherwise."""
    if present is None:
        return None
    if not isinstance(present, Tensor) or present.dtype != torch.bool or present.shape != (slots,):
        raise DataError(
            f"present must be a boolean tensor with {slots} entries, one a slot, False for an absent "
            f"record. Pass e.g. torch.ones({slots}, dtype=torch.bool)."
        )
    return present


def columns_of_record(record: Mapping[str, Any], inputs: Columns, targets: Columns) -> tuple[Any, Any]:
    """Inputs and targets of one record with named columns, a row each."""

    def column(name: str) -> Tensor:
        return _number(name, record[name]).unsqueeze(0)

    def call(function: Callable[[Any], Any]) -> Any:
        return map_leaves(
            function(record), lambda value: _number("of a function", value).unsqueeze(0), lists=False
        )

    return _choose(record, column, call, inputs, targets)


def columns_of_table(
    table: TableRecords, slots: Sequence[int], inputs: Columns, targets: Columns
) -> tuple[Any, Any]:
    """Inputs and targets of some rows of a table; the columns are given by name."""

    def column(name: str) -> Tensor:
        return _number(name, table.column(name, slots))

    return _choose(table.names, column, None, inputs, targets)


def columns_of_collated(rows: Mapping[str, Any], inputs: Columns, targets: Columns) -> tuple[Any, Any]:
    """Inputs and targets from a collate function's tensors by name, which have a row a record."""
    return _choose(rows, rows.__getitem__, lambda function: function(rows), inputs, targets)


def _choose(
    names: Iterable[str],
    column: Callable[[str], Any],
    call: Callable[[Callable[[Any], Any]], Any] | None,
    inputs: Columns,
    targets: Columns,
) -> tuple[Any, Any]:
    """Inputs and targets; inputs that are not given are all columns but those of the targets."""
    if targets is None:
        raise DataError(
            f"a record has the columns {', '.join(map(str, names))}, and nothing says which of them is "
            'to be predicted. Pass hush.Source(data, inputs=["age", "hours"], targets="income"), '
            "or a collate_fn that returns (inputs, targets)."
        )
    if inputs is None:
        taken = set() if callable(targets) else _names_in(targets)
        _check_named(taken, names)
        inputs = {name: name for name in names if name not in taken}

    def pick(columns: Any) -> Any:
        if callable(columns):
            assert call is not None
            return call(columns)
        if isinstance(columns, dict):
            return {key: pick(part) for key, part in columns.items()}
        _check_named(_names_in(columns), names)
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

    return pick(inputs), pick(targets)


def _names_in(columns: Any) -> set[str]:
    """Names of the chosen columns."""
    if isinstance(columns, str):
        return {columns}
    parts = columns.values() if isinstance(columns, dict) else columns
    return {name for part in parts for name in _names_in(part)}


def _check_named(chosen: set[str], names: Iterable[str]) -> None:
    """Raise for a column that the data does not have."""
    missing = chosen - set(names)
    if missing:
        raise DataError(
            f"there is no column {', '.join(sorted(map(repr, missing)))}; the columns are "
            f"{', '.join(map(str, names))}."
        )


def _number(name: str, value: Any) -> Tensor:
    """Numbers of a column: integers and booleans as they are, others in torch's default precision."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"column {name!r} does not hold a number, or numbers, in every record. Encode words, dates "
            "and missing values by a public list (categories numbered by the values that are present "
            "depend on the records), leave the column out, or pass a function of the record."
        )
    tensor = tensor_of(array)
    if array.dtype.kind == "f":
        return tensor.to(torch.get_default_dtype())
    return tensor if array.dtype.kind == "b" else tensor.long()


def tensor_of(values: npt.NDArray[Any]) -> Tensor:
    """Tensor of an array's numbers, in the machine's byte order."""
    return torch.from_numpy(np.require(values, values.dtype.newbyteorder("="), ["C", "W"]))


def leaves(value: Any) -> Iterator[Any]:
    """Leaves of a tree of tuples, lists and mappings."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


def map_leaves(value: Any, function: Callable[[Any], Any], *, lists: bool = True) -> Any:
    """The tree with a function applied to each leaf; without `lists`, a list is a leaf."""
    if isinstance(value, tuple) or (lists and isinstance(value, list)):
        return type(value)(map_leaves(part, function, lists=lists) for part in value)
    if isinstance(value, Mapping):
        return {key: map_leaves(part, function, lists=lists) for key, part in value.items()}
    return function(value)


def _numeric(part: Any) -> bool:
    """Whether a tree holds only tensors and arrays, at least one."""
    values = list(leaves(part))
    return bool(values) and all(isinstance(value, (Tensor, np.ndarray)) for value in values)
