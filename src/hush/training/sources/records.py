"""Numbered records of whatever holds them: map-style data sets, arrays on disk, tables."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset, TensorDataset

from hush.core.errors import DataError
from hush.core.value import with_article


@runtime_checkable
class MapStyle(Protocol):
    """A data set whose records have numbers: item i is record i, whatever was asked for before."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class ArrayRecords:
    """Rows of tensors or arrays, which may be memory-mapped: only rows that are asked for are read."""

    inputs: Any
    targets: Any
    order: npt.NDArray[np.int64] | None = None
    """Row of each slot; None: slot i is row i."""

    def __post_init__(self) -> None:
        for part in leaves((self.inputs, self.targets)):
            if isinstance(part, np.ndarray) and part.dtype.kind not in "biufc":
                raise DataError(
                    f"an array of type {part.dtype} holds no numbers: gradients are taken of numbers. "
                    "Turn it into numbers by a rule that does not look at the records."
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
    """Rows of a pandas DataFrame, by their position; the index is not looked at."""

    table: Any

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.table.iloc[[index]]
        return {name: row[name].to_numpy()[0] for name in self.names}

    @property
    def names(self) -> list[str]:
        """The columns' names."""
        return list(self.table.columns)

    def column(self, name: str, slots: Sequence[int]) -> npt.NDArray[Any]:
        """Values of some rows in one column, as objects where they are not of the column's type.

        Missing integers come out as floating-point numbers: a type that follows the records.
        """
        column = self.table[name]
        values = np.asarray(column.iloc[list(slots)].to_numpy())
        return (
            values if values.dtype.kind == getattr(column.dtype, "kind", "O") else values.astype(object)
        )


def numbered(data: Any) -> MapStyle:
    """The data's records by number; raises where they have none, or are not what a record is."""
    if isinstance(data, (tuple, list)) and len(data) == 2 and all(map(_numeric, data)):
        return ArrayRecords(*data)
    if isinstance(data, tuple) and len(data) == 2:
        kinds = " and ".join(type(part).__name__ for part in data)
        way_out = "(torch.as_tensor(inputs), torch.as_tensor(targets))"
        if isinstance(data[0], Mapping):
            listed = [repr(name) for name, part in data[0].items() if not _numeric(part)]
            kinds += f" ({', '.join(listed)} without tensors)" if listed else ""
            way_out = (
                "a tensor for each name, and one of targets: of a tokenizer "
                'tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt"), with '
                "max_length= a public number"
            )
        if hasattr(data[0], "iloc"):
            way_out = 'one table: hush.Source(frame, inputs=["age", "hours"], targets="income")'
        raise DataError(
            f"inputs and targets are of the kinds {kinds}, and gradients are taken of tensors. Pass "
            f"{way_out}."
        )
    if isinstance(data, dict):
        raise DataError(
            f"{with_article(type(data).__name__)} with {', '.join(map(repr, data))} has no numbered "
            "records: which part of it is drawn from is not said. Pass the one with the private "
            "records, e.g. data['train'], or a pair (inputs, targets)."
        )
    if hasattr(data, "iloc") and hasattr(data, "columns"):
        return TableRecords(data)
    if type(data) is Subset:  # as random_split makes: rows are read all at once
        whole, order = uncut(data)
        if type(whole) is TensorDataset and len(whole.tensors) == 2:
            return ArrayRecords(*whole.tensors, np.asarray(order, np.int64))
    stream = isinstance(data, IterableDataset) or hasattr(data, "__next__")
    if stream or not isinstance(data, MapStyle) or isinstance(data, (tuple, list, Tensor)):
        raise DataError(
            f"{with_article(type(data).__name__)} has no numbered records: each step takes every record "
            "or not by a coin of its own, which is what is charged, and a stream hands out records in "
            "an order of its own: no sampling, no charge. Pass two tensors (inputs, targets) or a "
            "map-style data set (of a DataLoader, its .dataset, collate_fn=loader.collate_fn, "
            "workers=loader.num_workers); write a stream to disk once, as arrays or as a data set."
        )
    return data


def uncut(data: "Subset[Any]") -> tuple[Any, list[int]]:
    """The data set that a subset was cut from, through other subsets, and its records' numbers there."""
    base: Any = data.dataset
    indices = list(data.indices)
    while isinstance(base, Subset):
        base, indices = base.dataset, [base.indices[index] for index in indices]
    return base, indices


def check_lengths(inputs: Any, targets: Any) -> None:
    """Raise unless every tensor or array has a row for each record, and nothing else is there."""
    for part in (inputs, targets):
        _check_rows(part)
    parts = [[rows for rows in leaves(part) if hasattr(rows, "ndim")] for part in (inputs, targets)]
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
            "data with a tensor of shape (): it has no rows, and a record is one of each. Pass "
            "tensors whose first dimension is the records."
        )
    raise DataError(
        f"{' and '.join(map(str, counts[0]))} inputs and {counts[1][0]} targets: each record needs one "
        "of each, or one record's influence is not bounded. Pass tensors with the same number of rows."
    )


def _check_rows(part: Any) -> None:
    """Raise if a tree of tensors holds something that has no rows: a flag, a number, None."""
    others = [value for value in leaves(part) if not hasattr(value, "ndim")]
    if not others:
        return
    named = part.items() if isinstance(part, Mapping) else ()
    names = [repr(name) for name, value in named if any(value is other for other in others)]
    kind = with_article(type(others[0]).__name__)
    raise DataError(
        f"{', '.join(names) or 'part of the data'} is {kind}, which has no row for each record: records "
        "are worked on one by one, each with its own rows. Leave it out, and set it in the model "
        "(model.config.use_cache = False), or in a forward() of your own that passes it on."
    )


_ONE_SHAPE = (
    "the records of a batch are worked on together, in one tensor. Pad them all to one public length "
    "(torch.nn.utils.rnn.pad_sequence, and a mask as another input), cut them, or pass a data set of "
    "them and pad_to=."
)


def check_present(present: object, slots: int) -> Tensor | None:
    """`present` if it says of each slot whether it holds a record; raises otherwise."""
    if present is None:
        return None
    if not isinstance(present, Tensor) or present.dtype != torch.bool or present.shape != (slots,):
        raise DataError(
            f"present must be a boolean tensor with {slots} entries, one a slot: an absent record "
            "leaves its slot empty, and the number of slots is public. Pass e.g. "
            f"torch.ones({slots}, dtype=torch.bool) with False where a record is missing."
        )
    return present


def tensor_of(values: npt.NDArray[Any]) -> Tensor:
    """A tensor of an array's numbers, in the machine's byte order."""
    return torch.from_numpy(np.require(values, values.dtype.newbyteorder("="), ["C", "W"]))


def leaves(value: Any) -> Iterator[Any]:
    """What a tree of tuples, lists and dictionaries holds, of any kind."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from leaves(part)
    else:
        yield value


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """The tree with a function applied to everything that it holds."""
    if isinstance(value, (tuple, list)):
        return type(value)(map_leaves(part, function) for part in value)
    if isinstance(value, Mapping):
        return {key: map_leaves(part, function) for key, part in value.items()}
    return function(value)


def _numeric(part: Any) -> bool:
    """Whether a tree holds tensors and arrays alone, and one at least."""
    values = list(leaves(part))
    return bool(values) and all(isinstance(value, (Tensor, np.ndarray)) for value in values)
