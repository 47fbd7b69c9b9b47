"""Rows of a physical batch from records one at a time: no row depends on another record.

A record is collated alone and padded to a public length, so that neither another record's values nor
its length reach it: docs/guarantees/tape.md, 12.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from hush.core.errors import DataError
from hush.core.value import with_article
from hush.training.sources.records import leaves, map_leaves


def pair_of_rows(rows: Any) -> tuple[Any, Any]:
    """Inputs and targets of one collated record, if it is such a pair, each with one row."""
    if not isinstance(rows, (tuple, list)) or len(rows) != 2:
        raise DataError(
            f"a record of this data set is not a pair (input, target) of tensors but gives "
            f"{type(rows).__name__}: wrap the data set so that item i is such a pair, or pass a "
            "collate_fn that makes one of [record]."
        )
    inputs, targets = (_plain(part) for part in rows)
    for value in leaves((inputs, targets)):
        if not isinstance(value, Tensor):
            raise DataError(
                f"a record holds {with_article(type(value).__name__)} where a tensor is needed: "
                "gradients are taken of numbers. Leave it out, or turn it into a tensor in the data set "
                "or in collate_fn."
            )
        if not value.dim() or len(value) != 1:
            raise DataError(
                "collate_fn gave a tensor whose first dimension is not 1 for one record: it is called "
                "with [record], one record at a time, so that no row depends on another record. Return "
                "tensors with a row a record."
            )
    if not all(any(True for _ in leaves(part)) for part in (inputs, targets)):
        raise DataError(
            "a record has no input or no target: its loss is of both. Return a pair (inputs, targets), "
            "neither of them empty."
        )
    return tuple(inputs) if isinstance(inputs, list) else inputs, targets


def default_row(record: Any) -> Any:
    """One record as torch's default collate function has it, with a row."""
    try:
        return default_collate([record])
    except TypeError:
        raise DataError(
            "a record of this data set is not made of tensors, arrays and numbers (which is private and "
            "not shown): gradients are taken of numbers. Turn it into tensors there, or pass a "
            "collate_fn that makes them of [record]."
        ) from None


def _plain(part: Any) -> Any:
    """The tree with dictionaries for other mappings, as tokenizers return."""
    if isinstance(part, (Tensor, dict)):  # nearly always, and asked of every record
        return part
    if isinstance(part, Mapping):
        return {key: _plain(value) for key, value in part.items()}
    return part


def pad(rows: Any, length: Any, value: Any) -> Any:
    """The tree with the second dimension of its tensors padded, or cut, to public lengths.

    Args:
        rows: tensors with a row a record; those without a second dimension stay as they are.
        length: for all tensors; or a tuple or dictionary of lengths for parts of the tree; None: as it
            is.
        value: what to fill up with, likewise.
    """
    if length is None:
        return rows
    if isinstance(rows, Tensor):
        return _pad_rows(rows, length, value)
    if isinstance(length, dict):
        _check_padded(rows, length)
    if isinstance(rows, dict):
        return {key: pad(part, _part(length, key), _part(value, key, 0)) for key, part in rows.items()}
    return type(rows)(
        pad(part, _part(length, place), _part(value, place, 0)) for place, part in enumerate(rows)
    )


def _check_padded(rows: Any, length: dict[Any, Any]) -> None:
    """Raise for a length of a part that no record has: the part that is meant would stay ragged."""
    names = list(rows) if isinstance(rows, dict) else []
    missing = [name for name in length if name not in names]
    if missing:
        parts = f"the parts {', '.join(map(repr, names))}" if names else "no names, but a place each"
        raise DataError(
            f"pad_to has a length for {', '.join(map(repr, missing))}, and what it is for has {parts}: "
            "nothing would be padded to it. Name the parts that the collate function, or the data set, "
            'gives; of inputs by name and targets, pad_to=({"words": 128}, None).'
        )


def _part(choice: Any, key: Any, otherwise: Any = None) -> Any:
    """What is chosen for one part of a tree, or for all of them."""
    if isinstance(choice, dict):
        return choice.get(key, otherwise)
    if isinstance(choice, (tuple, list)):
        return choice[key] if isinstance(key, int) and key < len(choice) else otherwise
    return choice


def _pad_rows(rows: Tensor, length: int, value: Any) -> Tensor:
    if rows.dim() < 2 or rows.shape[1] == length:
        return rows
    if rows.shape[1] > length:
        return rows[:, :length]
    filling = rows.new_full((len(rows), length - rows.shape[1], *rows.shape[2:]), value)
    return torch.cat([rows, filling], 1)


def same_kind(row: Any, template: Any) -> bool:
    """Whether a row has the structure, types and shapes of another."""
    if isinstance(template, Tensor):
        return (
            isinstance(row, Tensor)
            and row.dtype == template.dtype
            and row.shape[1:] == template.shape[1:]
        )
    if type(row) is not type(template) or len(row) != len(template):
        return False
    if isinstance(template, dict):
        return row.keys() == template.keys() and all(same_kind(row[key], template[key]) for key in row)
    return all(map(same_kind, row, template))


OTHER_SHAPE = (
    "a record came out in another shape or type than the first one (which are private and not shown): "
    "shapes decide how kernels round and which CUDA graph runs, so they must be public and the same for "
    "all records; padded to the longest of its batch, a record would depend on the lengths of others. "
    "Pass pad_to= a public length, or a collate_fn that pads to one."
)


def stack(rows: list[Any]) -> Any:
    """Rows of the same kind, one below the other."""
    first = rows[0]
    if isinstance(first, Tensor):
        return torch.cat(rows)
    if isinstance(first, dict):
        return {key: stack([row[key] for row in rows]) for key in first}
    return type(first)(stack([row[place] for row in rows]) for place in range(len(first)))


def blank(template: Any) -> Any:
    """A row of zeros, which stands in an empty slot."""
    return map_leaves(template, torch.zeros_like)
