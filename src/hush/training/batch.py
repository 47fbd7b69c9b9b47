"""One logical batch: the slots drawn for one step, handed out in physical batches that fit memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hush.core.errors import DataError
from hush.training.records import Data, take


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """Slots drawn for one step. Which and how many they are is sensitive.

    The layout, which slots share a physical batch and in which order, follows from the draw alone:
    an empty slot that is drawn takes its place like any other.
    """

    indices: Tensor
    data: Data
    physical: int
    present: Tensor | None = None
    """Whether each slot of the data holds a record; None: all do."""

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[Any, Any, Tensor | None]]:
        """Inputs, targets, and which of them are records (None: all), a physical batch at a time."""
        for part in self.indices.split(self.physical) if len(self) else ():
            inputs, targets = take(self.data, part)
            yield inputs, targets, None if self.present is None else self.present[part.cpu()]


def check_present(present: object, records: int) -> Tensor | None:
    """`present` if it says of each slot whether it holds a record; raises otherwise."""
    if present is None:
        return None
    fits = isinstance(present, Tensor) and present.dtype == torch.bool
    if not fits or present.shape != (records,):  # type: ignore[attr-defined]
        raise DataError(
            f"present must be a boolean tensor with {records} entries, one a slot: an absent record "
            "leaves its slot empty, and the number of slots is public. Pass e.g. "
            f"torch.ones({records}, dtype=torch.bool) with False where a record is missing."
        )
    return present  # type: ignore[return-value]
