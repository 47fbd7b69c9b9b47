"""Public records stand apart from the private ones: none may be in both sets."""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hush.core.errors import DataError
from hush.gradients.tree import tree_leaves
from hush.training.data import Data, count, take

_AT_ONCE = 512


def check_public(public: Data, private: Data) -> None:
    """Raise if the public set is the private one, or has an input in common with it.

    Inputs are compared exactly (as single-precision numbers, whatever the labels): a record that was
    changed a little, by augmentation for instance, is not found. Whether this raises depends on the
    private records. It is a guard against a mistake, to stop a run before anything is released, and
    not part of what is released.
    """
    for ours in _held(public):
        if any(ours is theirs for theirs in _held(private)):
            raise DataError(f"the public data is the private data itself: {_REASON}")
    known = set(_names(public))
    if any(name in known for name in _names(private)):
        raise DataError(f"private records have the same inputs as public ones: {_REASON}")


_REASON = (
    "what is worked out from public records is released without noise and without a charge, so a record "
    "in both sets has no protection. Split the records before training, equal ones to the same side, "
    "or generate public ones."
)


def _held(data: Data) -> Iterator[Any]:
    """What holds the records: the data set itself, and its inputs where they are tensors."""
    yield data
    held = getattr(data, "tensors", data)
    if isinstance(held, (tuple, list)) and held:
        yield from tree_leaves(held[0])


def _names(data: Data) -> Iterator[bytes]:
    """A name for each record's input; equal inputs have equal names."""
    for indices in torch.arange(count(data)).split(_AT_ONCE):
        parts = [_plain(part) for part in tree_leaves(take(data, indices)[0])]
        for row in range(len(indices)):
            name = hashlib.blake2b(digest_size=16)
            for part in parts:
                name.update(part[row].tobytes())
            yield name.digest()


def _plain(part: Tensor) -> Any:
    """The numbers as numpy has them, in one precision and with one zero."""
    kind = torch.float32 if part.is_floating_point() else torch.int64
    return (part.detach().to("cpu", kind) + 0).unsqueeze(-1).flatten(1).contiguous().numpy()
