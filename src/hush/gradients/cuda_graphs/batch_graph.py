"""A captured graph for batches of one size, with the memory that it reads from and writes to."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hush.core.tape import ClippedSum
from hush.gradients.cuda_graphs.cuda_graph import CapturedGraph
from hush.gradients.cuda_graphs.padding import records_of
from hush.gradients.tree import tree_leaves


@dataclass(frozen=True, eq=False)
class BatchGraph:
    """Clipped sum of a padded batch as a captured graph."""

    captured: CapturedGraph[ClippedSum]
    inputs: Any
    targets: Any
    present: Tensor
    occupied: list[int]
    """How many slots from the first on hold a record, if `present` says so now."""

    def fill(self, inputs: Any, targets: Any, present: Tensor | None) -> None:
        """Write a batch into the graph's memory, padded with copies of its first record.

        Args:
            inputs: of the batch, records first.
            targets: of the batch.
            present: whether each slot holds a record; None: all do.
        """
        records = records_of(inputs)
        memories, given = tree_leaves((self.inputs, self.targets)), tree_leaves((inputs, targets))
        for memory, rows in zip(memories, given, strict=True):
            if records == len(memory):
                memory.copy_(rows)
            else:
                memory[:records] = rows
                memory[records:] = rows[0]
        if present is not None or self.occupied != [records]:
            self.present[:records] = True if present is None else present
            self.present[records:] = False
            self.occupied[:] = [records] if present is None else []
