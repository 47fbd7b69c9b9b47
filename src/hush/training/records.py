"""Data as a numbered set of records, whatever holds it."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from hush.core.errors import DataError
from hush.gradients.structure import each, tensors


@runtime_checkable
class MapStyle(Protocol):
    """A data set whose records have numbers: item i is the pair (input, target) of record i."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data = tuple[Any, Any] | MapStyle
"""Inputs and targets with one row a record, or a map-style data set.

Each of the two is a tensor. Inputs may also be a tuple of tensors, for a model that takes several, or a
dictionary of them by the names of the model's arguments.
"""


def count(data: Data) -> int:
    """How many records there are; raises if they cannot be numbered."""
    pair = pair_of(data)
    if pair is not None:
        if any(not rows.dim() for part in pair for rows in tensors(part)):
            raise DataError(
                "data with a tensor of shape (): it has no rows, and a record is one of each. Pass "
                "tensors whose first dimension is the records."
            )
        inputs, targets = ([len(rows) for rows in tensors(part)] for part in pair)
        if len({*inputs, *targets}) > 1:
            raise DataError(
                f"{' and '.join(map(str, inputs))} inputs and {targets[0]} targets: each record needs "
                "one of each, or one record's influence is not bounded. Pass tensors with the same "
                "number of rows."
            )
        return _some(inputs[0])
    if isinstance(data, tuple) and len(data) == 2:
        kinds = " and ".join(type(part).__name__ for part in data)
        raise DataError(
            f"inputs and targets are of the kinds {kinds}, and gradients are taken of tensors. Pass "
            "(torch.as_tensor(inputs), torch.as_tensor(targets))."
        )
    if not isinstance(data, MapStyle) or isinstance(data, (tuple, list, dict, Tensor)):
        raise DataError(
            f"a {type(data).__name__} has no numbered records: sampling by chance needs to pick any "
            "record at any time. Pass two tensors (inputs, targets) or a map-style data set (of a "
            "DataLoader, its .dataset)."
        )
    return _some(len(data))


def _some(records: int) -> int:
    if records == 0:
        raise DataError("the data has no records: there is nothing to learn from. Pass at least one.")
    return records


def take(data: Data, indices: Tensor) -> tuple[Any, Any]:
    """The inputs and targets of these records."""
    pair = pair_of(data)
    if pair is not None:
        inputs, targets = each(pair, lambda rows: rows[indices.to(rows.device)])
        return inputs, targets
    records = default_collate([data[index] for index in indices.tolist()])
    if (
        not isinstance(records, (tuple, list))
        or len(records) != 2
        or not all(map(_has_tensors, records))
    ):
        raise DataError(
            f"a record of this data set is not a pair (input, target) of tensors but gives "
            f"{type(records).__name__}: wrap the data set so that item i is such a pair."
        )
    inputs, targets = records
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets


def pair_of(data: Data) -> Sequence[Any] | None:
    """Inputs and targets, where all of them are tensors in memory."""
    held = data.tensors if isinstance(data, TensorDataset) else data
    if not isinstance(held, (tuple, list)) or not all(map(_has_tensors, held)):
        return None
    if len(held) != 2:
        raise DataError(
            f"data of {len(held)} tensors: a record is an input and a target. Pass the pair "
            "(inputs, targets)."
        )
    return held


def _has_tensors(part: Any) -> bool:
    return next(tensors(part), None) is not None
