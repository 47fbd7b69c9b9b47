"""Data as a numbered set of records, whatever holds it."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from hush.core.errors import DataError


@runtime_checkable
class MapStyle(Protocol):
    """A data set whose records have numbers: item i is the pair (input, target) of record i."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


Data = tuple[Tensor, Tensor] | MapStyle
"""Inputs and targets as two tensors with one row a record, or a map-style data set."""


def count(data: Data) -> int:
    """How many records there are; raises if they cannot be numbered."""
    tensors = _tensors(data)
    if tensors is not None:
        inputs, targets = tensors
        if len(inputs) != len(targets):
            raise DataError(
                f"{len(inputs)} inputs and {len(targets)} targets: each record needs one of each, or "
                "one record's influence is not bounded. Pass tensors with the same number of rows."
            )
        return _some(len(inputs))
    if not isinstance(data, MapStyle) or isinstance(data, (tuple, list, dict)):
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


def take(data: Data, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The inputs and targets of these records."""
    tensors = _tensors(data)
    if tensors is not None:
        inputs, targets = tensors
        return inputs[indices.to(inputs.device)], targets[indices.to(targets.device)]
    records = default_collate([data[index] for index in indices.tolist()])
    if not isinstance(records, (tuple, list)) or [type(part) for part in records] != [Tensor, Tensor]:
        raise DataError(
            f"a record of this data set is not a pair (input, target) of tensors but gives "
            f"{type(records).__name__}: wrap the data set so that item i is such a pair."
        )
    inputs, targets = records
    return inputs, targets


def _tensors(data: Data) -> Sequence[Tensor] | None:
    held = data.tensors if isinstance(data, TensorDataset) else data
    if isinstance(held, (tuple, list)) and all(isinstance(part, Tensor) for part in held):
        if len(held) != 2:
            raise DataError(
                f"data of {len(held)} tensors: a record is an input and a target. Pass the pair "
                "(inputs, targets)."
            )
        return held
    return None
