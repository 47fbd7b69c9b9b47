"""One logical batch: who was drawn for one step, handed out in physical batches that fit memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hush.training.records import Data, take


@dataclass(frozen=True, eq=False, repr=False)
class Batch:
    """The records drawn for one step. Which and how many they are is sensitive."""

    indices: Tensor
    data: Data
    physical: int

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for part in self.indices.split(self.physical) if len(self) else ():
            yield take(self.data, part)
