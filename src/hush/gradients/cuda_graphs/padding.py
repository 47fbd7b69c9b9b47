"""Padded layout of batches: round sizes, so that work captured once serves batches of any size.

The size follows from the number of slots alone; what is added are copies of the first record, at weight
zero: a made-up one could be out of a vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from hush.gradients.tree import tree_leaves

_SIZE_MULTIPLE = 64
_SIZES_PER_OCTAVE = 16
"""Sizes between one and twice as many records, so that few graphs serve batches of random size."""


def padded_size(records: int, most: int | None = None) -> int:
    """Round size that a batch is padded to, a function of its number of slots.

    Args:
        records: slots of the batch.
        most: the physical batch, beyond which none is padded.
    """
    multiple = max(_SIZE_MULTIPLE, (1 << records.bit_length() >> 1) // _SIZES_PER_OCTAVE)
    size: int = -(-records // multiple) * multiple
    return size if most is None else max(records, min(size, most))


def pad(rows: Tensor, size: int) -> Tensor:
    """The rows, and copies of the first up to a number of them."""
    return torch.cat([rows, rows[:1].expand(size - len(rows), *rows.shape[1:])])


def pad_with_false(present: Tensor, size: int) -> Tensor:
    """Which slots of a padded batch hold a record."""
    return torch.cat([present, present.new_zeros(size - len(present))])


def occupied_slots(inputs: Any, present: Tensor | None) -> Tensor:
    """Whether each slot of a batch holds a record: all do, if nothing is said."""
    if present is not None:
        return present
    return torch.ones(records_of(inputs), dtype=torch.bool, device=next(tree_leaves(inputs)).device)


def records_of(inputs: Any) -> int:
    """Number of slots of a batch."""
    return len(next(tree_leaves(inputs)))
