"""Conversion of data sets, arrays and tables to rows of tensors.

Each record is converted to a tree of tensors with one row each, independently of other records
(docs/guarantees/tape.md, 12).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from hush.core.errors import DataError
from hush.core.value import with_article

Columns = str | list[str] | dict[str, Any] | Callable[[Any], Any] | None
"""Columns to read: a name, a list of names (stacked as a vector), a dictionary from argument names to
columns, or a function of the record."""

LONGEST = "longest"
"""Value of `pad_to` for padding to the longest record of a physical batch."""


@runtime_checkable
class MapStyle(Protocol):
    """Map-style data set. Item i is record i and must not depend on earlier reads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class ArrayRecords:
    """Rows of tensors or arrays; only the requested rows of memory-mapped arrays are read."""

    inputs: Any
    targets: Any
    order: npt.NDArray[np.int64] | None = None
    """Row number of each slot; None if slot i is row i."""

    def __post_init__(self) -> None:
        """Raise unless every tensor or array has one row per record."""
        inputs, targets = list(leaves(self.inputs)), list(leaves(self.targets))
        if not all(value.ndim for value in inputs + targets):
            raise DataError("a tensor of the data has shape (). Pass tensors with a row per record.")
        counts = [*map(len, inputs)], [*map(len, targets)]
        if len({*counts[0], *counts[1]}) == 1:
            for value in inputs + targets:
                check_numbers(value)
        elif isinstance(self.inputs, (list, tuple)) and len(self.inputs) == len(self.targets):
            # do not show the lengths of the records, which are private
            raise DataError(
                f"inputs is a {type(self.inputs).__name__} of {len(inputs)} tensors, one per record. "
                "Pass torch.stack(inputs), or pad records to one public length "
                "(torch.nn.utils.rnn.pad_sequence, with a mask as another input)."
            )
        else:
            raise DataError(
                f"{' and '.join(map(str, counts[0]))} inputs and {counts[1][0]} targets: each record "
                "needs one input and one target. Pass tensors with the same number of rows."
            )

    def __len__(self) -> int:
        return len(next(leaves(self.inputs)) if self.order is None else self.order)

    def __getitem__(self, index: int) -> Any:
        return map_leaves(self.rows([index]), lambda rows: rows[0])

    def rows(self, slots: Sequence[int]) -> tuple[Any, Any]:
        """Inputs and targets of these slots, one row per slot."""
        chosen = torch.as_tensor(slots, dtype=torch.int64)
        if self.order is not None:
            chosen = torch.from_numpy(self.order)[chosen]
        read = partial(rows_at, slots=chosen)
        return map_leaves(self.inputs, read), map_leaves(self.targets, read)


def rows_at(rows: Any, slots: Tensor) -> Tensor:
    """Rows of a tensor or array by index."""
    if not isinstance(rows, Tensor):  # convert to native byte order
        chosen = np.asarray(rows[slots.numpy()])
        return torch.from_numpy(np.require(chosen, chosen.dtype.newbyteorder("="), ["C", "W"]))
    if rows.device != slots.device:  # asynchronous copy
        slots = slots.to(rows.device, non_blocking=rows.is_cuda)
    return rows[slots]


@dataclass(frozen=True, eq=False)
class TableRecords:
    """Rows of a pandas DataFrame by position; the index is ignored."""

    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.table.iloc[[index]]
        return {name: row[name].to_numpy()[0] for name in row.columns}

    def arrays(self, inputs: Columns, targets: Columns) -> ArrayRecords:
        """Named columns as arrays."""
        return ArrayRecords(*_choose(self.table, _number, inputs, targets))


def numbered(data: Any) -> MapStyle:
    """Convert data to a map-style data set; raise if this is not possible."""
    pair = data.tensors if type(data) is TensorDataset else data
    if isinstance(pair, (tuple, list)) and len(pair) == 2 and has_leaves(pair, Tensor, np.ndarray):
        return ArrayRecords(*pair)
    if isinstance(data, tuple):
        raise DataError(
            f"the data is a tuple of {', '.join(type(part).__name__ for part in data)}. Pass a pair "
            "(inputs, targets) of tensors or arrays with a row per record (from a tokenizer: "
            'padding="max_length", return_tensors="pt"), or a whole table: hush.Source(frame, '
            'inputs=["age", "hours"], targets="income").'
        )
    kind = with_article(type(data).__name__)
    if isinstance(data, dict):
        raise DataError(
            f"{kind} with {', '.join(map(repr, data))} has no numbered records. Pass the split with the "
            "private records, e.g. data['train'], or a pair (inputs, targets)."
        )
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        return TableRecords(data)
    if type(data) is Subset:  # e.g. from random_split: read all rows at once
        whole, order = base_dataset(data)
        if type(whole) is TensorDataset and len(whole.tensors) == 2:
            return ArrayRecords(*whole.tensors, np.asarray(order, np.int64))
    if isinstance(data, (IterableDataset, tuple, list, Tensor)) or not isinstance(data, MapStyle):
        raise DataError(
            f"{kind} has no numbered records, which Poisson sampling needs. Pass two tensors (inputs, "
            "targets) or a map-style data set, e.g. hush.Source(loader.dataset, "
            "collate_fn=loader.collate_fn, workers=loader.num_workers); write a stream to disk first."
        )
    return data


def base_dataset(data: "Subset[Any]") -> tuple[Any, list[int]]:
    """Underlying data set of nested subsets, and the indices of their records."""
    base: Any = data.dataset
    indices = list(data.indices)
    while isinstance(base, Subset):
        base, indices = base.dataset, [base.indices[index] for index in indices]
    return base, indices


def check_numbers(rows: Any) -> None:
    """Raise unless a tensor or array is dense and numeric, with non-empty rows."""
    if isinstance(rows, Tensor) and (rows.layout != torch.strided or rows.is_quantized or rows.is_meta):
        raise DataError(
            "the data contains a sparse, quantized or meta tensor. Use .to_dense() or .dequantize()."
        )
    if np.ma.is_masked(rows):
        raise DataError(
            "an array has masked entries, whose hidden values would be used. Pass e.g. "
            "array.filled(0.0), or drop each such row independently."
        )
    if isinstance(rows, np.ndarray) and rows.dtype.kind not in "biufc":
        raise DataError(f"an array of type {rows.dtype} is not numeric. Convert it by a public rule.")
    if 0 in rows.shape[1:]:
        raise DataError(
            f"a record has an empty tensor of shape {tuple(rows.shape[1:])}. Leave the tensor out, or "
            "check how its columns were selected."
        )


def check_present(present: object, slots: int) -> Tensor | None:
    """Validate the mask of non-empty slots."""
    if present is None or (
        isinstance(present, Tensor) and present.dtype == torch.bool and present.shape == (slots,)
    ):
        return present
    raise DataError(
        f"present must be a boolean tensor with {slots} entries, one per slot, False for an absent "
        f"record. Pass e.g. torch.ones({slots}, dtype=torch.bool)."
    )


def row_of(
    record: Any, collate_fn: Callable[[list[Any]], Any] | None, inputs: Columns, targets: Columns
) -> tuple[Any, Any]:
    """Inputs and targets of one record of a data set, as rows."""
    rows = record if collate_fn is None else collate_fn([record])
    if isinstance(rows, Mapping):
        alone = collate_fn is None
        rows = _choose(
            rows, lambda name, value: _number(name, value)[None] if alone else value, inputs, targets
        )
    else:
        if inputs is not None or targets is not None:
            raise DataError(
                "inputs= and targets= select columns, but these records have no columns. Leave both "
                "out, or pass a collate_fn that converts [record] to (inputs, targets)."
            )
        try:
            rows = default_collate([record]) if collate_fn is None else rows
        except (TypeError, RuntimeError):
            raise DataError(
                "a record of this data set does not consist of dense tensors, arrays and numbers "
                "(private, not shown). Convert it (sparse: .to_dense()) in the data set or in a "
                "collate_fn."
            ) from None
    if not isinstance(rows, (tuple, list)) or len(rows) != 2 or not has_leaves(rows, object):
        raise DataError(
            "a record of this data set is not a pair (input, target) of tensors but "
            f"{type(rows).__name__}. Wrap the data set, or pass a collate_fn that converts [record]."
        )
    for value in leaves(rows):
        if not isinstance(value, Tensor):
            raise DataError(
                f"a record contains {with_article(type(value).__name__)} instead of a tensor. Leave it "
                "out, or convert it in the data set or in collate_fn."
            )
        if not value.dim() or len(value) != 1:
            raise DataError(
                "collate_fn returned a tensor with a first dimension other than 1 for one record. "
                "Return tensors with one row per record."
            )
    return map_leaves(rows[0], lambda value: value), map_leaves(rows[1], lambda value: value)


def _choose(
    record: Any, convert: Callable[[str, Any], Any], inputs: Columns, targets: Columns
) -> tuple[Any, Any]:
    """Select inputs (by default all other columns) and targets; `convert` returns a column's tensor."""
    names = list(record)

    def pick(columns: Any) -> Any:
        if callable(columns):
            return map_leaves(columns(record), partial(convert, "of a function"), lists=False)
        if isinstance(columns, dict):
            return {key: pick(part) for key, part in columns.items()}
        if isinstance(columns, str):
            if columns not in names:
                raise DataError(
                    f"there is no column {columns!r}; the columns are {', '.join(map(str, names))}."
                )
            return convert(columns, record[columns])
        parts = [pick(name) for name in columns]
        if any(part.dim() != 1 for part in parts):
            raise DataError(
                f"a column of {columns} has several numbers per record, but each column in a list must "
                "have one number. Pass a dictionary from argument names to columns."
            )
        return torch.stack([part.to(torch.get_default_dtype()) for part in parts], 1)

    if targets is None:
        raise DataError(
            f"a record has the columns {', '.join(map(str, names))}, but no target was named. Pass e.g. "
            'hush.Source(data, inputs=["age"], targets="income"), or a collate_fn that returns a pair.'
        )
    chosen = pick(targets)
    others = {name: name for name in names if name not in list(leaves(targets))}
    return pick(others if inputs is None else inputs), chosen


def _number(name: str, value: Any) -> Tensor:
    """Convert a column to integers, booleans, or floats in torch's default precision."""
    if isinstance(value, Tensor):
        return value
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    # missing integers change the dtype of a table's column
    same = array.dtype.kind == getattr(getattr(value, "dtype", None), "kind", array.dtype.kind)
    if array.dtype.kind not in "biuf" or not same:
        raise DataError(
            f"column {name!r} is not numeric in every record. Encode words, dates and missing values "
            "with a public list (not with the observed values), leave the column out, or pass a "
            "function of the record."
        )
    kinds = {"b": np.bool_, "f": np.float64}
    tensor = torch.from_numpy(array.astype(kinds.get(array.dtype.kind, np.int64), "C"))
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor


def leaves(value: Any) -> Iterator[Any]:
    """Leaves of a tree of tuples, lists and mappings."""
    if not isinstance(value, (tuple, list, Mapping)):
        yield value
        return
    for part in value.values() if isinstance(value, Mapping) else value:
        yield from leaves(part)


def map_leaves(value: Any, function: Callable[[Any], Any], *, lists: bool = True) -> Any:
    """Apply a function to each leaf (or list) of a tree; mappings become plain dictionaries."""
    if isinstance(value, tuple) or (lists and isinstance(value, list)):
        return type(value)(map_leaves(part, function, lists=lists) for part in value)
    if isinstance(value, Mapping):
        return {key: map_leaves(part, function, lists=lists) for key, part in value.items()}
    return function(value)


def has_leaves(parts: Sequence[Any], *kinds: type) -> bool:
    """Whether each part is a non-empty tree with leaves of these types."""
    trees = [[part] if isinstance(part, Tensor) else list(leaves(part)) for part in parts]
    return all(tree and all(isinstance(value, kinds) for value in tree) for tree in trees)


def check_alike(row: Any, template: Any, *, any_length: bool) -> None:
    """Raise unless a row has the structure, types and shapes of the first row.

    With `any_length`, the first dimension of a record may differ.
    """
    both = row, template
    kind, first = (
        map_leaves(each, lambda part: (part.dtype, part.dim(), part.shape[2:])) for each in both
    )
    if kind != first:
        raise DataError(
            "a record differs from the first record in structure, type or shape (private, not shown). "
            "Fix this in the data set or in collate_fn; only the first dimension is padded."
        )
    length, expected = (map_leaves(each, lambda part: part.shape[1:2]) for each in both)
    if not any_length and length != expected:
        raise DataError(
            "a record differs from the first record in length (private, not shown). Pass a public "
            f'length as pad_to=, or pad_to="{LONGEST}" for a model that ignores padding.'
        )


def pad(rows: Any, length: Any, value: Any) -> Any:
    """Pad or cut the second dimension of each tensor to public lengths, if they are given."""
    return rows if length is None or length == LONGEST else _map_with(_padded, rows, length, value)


def lengthened(rows: Any, value: Any) -> Any:
    """Add one position of padding to each tensor with at least two dimensions."""
    return _map_with(lambda part, fill: _padded(part, (*part.shape, 0)[1] + 1, fill), rows, value)


def stack(parts: Sequence[Any], value: Any, *, pinned: bool = False) -> Any:
    """Concatenate rows of the same structure, padded to the longest."""

    def join(first: Tensor, fill: Any, *others: Tensor) -> Tensor:
        longest = max(part.shape[1] for part in (first, *others)) if first.dim() > 1 else None
        rows = [_padded(part, longest, fill) for part in (first, *others)]
        if not pinned:
            return torch.cat(rows)
        shape = (sum(map(len, rows)), *rows[0].shape[1:])
        return torch.cat(rows, out=torch.empty(shape, dtype=first.dtype, pin_memory=True))

    return _map_with(join, parts[0], value, *parts[1:])


def _map_with(function: Callable[..., Tensor], rows: Any, *choices: Any) -> Any:
    """Apply a function to each tensor of a tree, with the corresponding parts of other trees.

    A choice is one value for all tensors, or a tree of values. A missing part is None.
    """
    if isinstance(rows, Tensor):
        return function(rows, *choices)
    tables = [dict(enumerate(each)) if isinstance(each, (tuple, list)) else each for each in choices]
    mapped = {}
    for key, part in rows.items() if isinstance(rows, dict) else enumerate(rows):
        own = [table.get(key) if isinstance(table, dict) else table for table in tables]
        mapped[key] = _map_with(function, part, *own)
    return mapped if isinstance(rows, dict) else type(rows)(mapped.values())


def _padded(rows: Tensor, length: int | None, value: Any) -> Tensor:
    """Pad or cut rows to a length; None pads with 0."""
    if length is None or rows.dim() < 2 or rows.shape[1] == length:
        return rows
    if rows.shape[1] > length:
        return rows[:, :length]
    shape = len(rows), length - rows.shape[1], *rows.shape[2:]
    return torch.cat([rows, rows.new_full(shape, 0 if value is None else value)], 1)
