"""Shares of unequal size, or empty."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hush
from hush.training.data import Batch
from tests.training.distributed import spawned
from tests.training.distributed.problems import RECORDS, data_of, step_of

DRAWN = (0, 1, 2, 5, 11, RECORDS)
"""Slots of a batch, for two ranks and physical batches of 5: none, one rank's alone, uneven, all."""


def drawn_by_hand(step: hush.PrivateStep, data: Any, sizes: tuple[int, ...]) -> list[Tensor]:
    """Updates of steps whose batches are the last slots of the data, so many of them."""
    wanted = iter(sizes)

    def draw(like: Batch, sampling: Any = None) -> Batch:
        return replace(like, indices=torch.arange(RECORDS - next(wanted), RECORDS))

    step.draw = draw  # type: ignore[method-assign]
    updates = []
    for batch in step.batches(data, steps=len(sizes)):
        step(batch)
        assert step.update is not None
        updates.append(step.update.clone())
    return updates


def sums_of(step: hush.PrivateStep, data: Any) -> list[Tensor]:
    step.batches(data)
    empty = Batch(torch.arange(0), data, 5)
    return [
        step.clipped_sum(replace(empty, indices=torch.arange(RECORDS - size, RECORDS))).clone()
        for size in DRAWN
    ]


def shares(folder: Path) -> dict[str, Any]:
    step = step_of(seed=0)
    sums = sums_of(step, data_of())
    updates = drawn_by_hand(step_of(seed=0), data_of(), DRAWN)
    return {"sums": sums, "updates": updates}


result = partial(spawned.result, __name__, 2)


def test_unequal_and_empty_shares_make_the_sum_of_one_process() -> None:
    first, second = result("shares")
    one = sums_of(step_of(seed=0), data_of())
    for ours, theirs, whole in zip(first["sums"], second["sums"], one, strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, whole, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(first["updates"], second["updates"], strict=True):
        assert torch.equal(ours, theirs)
