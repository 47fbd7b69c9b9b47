"""Collectives of a step: one reduction of one gradient, however many physical batches it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hush
from tests.training.distributed import spawned
from tests.training.distributed.problems import RECORDS, data_of, model_of, plan_of, step_of, weights_of

SIZE = weights_of(model_of()).numel()
SLICE = -(-SIZE // 2)
MESSAGE = 4096
BATCHES = (1, 7, RECORDS)
"""Records of a physical batch: forty physical batches a step, six, and one."""


class Collectives(TorchDispatchMode):
    """Name of each collective that torch runs, and how many bytes this rank gives it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.seen.append((func._opname, args[1].nbytes))
        return func(*args, **(kwargs or {}))


def traffic(folder: Path) -> dict[int, list[tuple[str, int]]]:
    """Collectives of the second step, by size of the physical batch."""
    seen = {}
    for size in BATCHES:
        step = step_of(
            plan=plan_of(sampling=hush.FullBatch()), execution=hush.Execution(physical_batch=size)
        )
        batches = step.batches(data_of(), steps=2)
        step(next(batches))
        batch = next(batches)
        with Collectives() as collectives:
            step(batch)
        seen[size] = collectives.seen
    return seen


def result() -> list[dict[int, list[tuple[str, int]]]]:
    return spawned.run(__name__, 2)["traffic"]


@pytest.mark.parametrize("size", BATCHES)
def test_a_step_reduces_one_gradient_once(size: int) -> None:
    """Each rank sends the others' slices of its sum, and then its own slice with its noise."""
    for seen in result():
        vectors = [each for each in seen[size] if each != ("_allgather_base_", MESSAGE)]
        double = torch.float64.itemsize
        assert vectors == [("alltoall_base_", 2 * SLICE * double), ("_allgather_base_", SLICE * double)]


def test_messages_do_not_grow_with_the_physical_batches() -> None:
    """About the sum and the weights, and of the charge before and after it is on disk."""
    for seen in result():
        counts = {seen[size].count(("_allgather_base_", MESSAGE)) for size in BATCHES}
        assert len(counts) == 1
        assert max(counts) >= 3
