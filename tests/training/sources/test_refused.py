"""Sources that a step must not go on with, and what a refusal shows."""

import os
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Subset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import hush
from hush.core.errors import DataError
from hush.training.data import Batch, prepare
from tests.training.helpers import all_but
from tests.training.sources.problems import Items, files, rows, step_for


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_record_shows_nothing_of_it(workers: int) -> None:
    source = prepare(hush.Source(files([5]), workers=workers))
    for _ in range(2):  # workers that were left with unread batches do not spoil the next list
        with pytest.raises(DataError, match=r"FileNotFoundError in problems.py, line \d+") as raised:
            rows(source, list(range(8)), 2)
        assert "alice" not in str(raised.value)
        assert raised.value.__context__ is None
        del raised  # a cycle with this frame: torch waits 5 seconds for each worker that one holds
        assert rows(source, [6, 0], 2) == [[6.0] * 4, [0.0] * 4]


def test_a_step_that_meets_an_unreadable_record_is_not_charged() -> None:
    step = step_for(8)
    reading = (step(batch) for batch in step.batches(files([3]), steps=20))
    with pytest.raises(DataError, match="could not be read"):
        list(reading)
    assert step.ledger.counts.get(step.plan, 0) == step.steps < 20


def test_a_record_in_two_slots_is_refused_unless_its_owner_is_the_unit() -> None:
    twice: Subset[Any] = Subset(files(), [0, 1, 2, 3, 4, 5, 6, 6])
    with pytest.raises(DataError, match="in several slots"):
        step_for(8).batches(twice)
    units = hush.Units(owners=[0, 1, 2, 3, 4, 5, 6, 6], per_unit=2)
    assert step_for(None, units=units).batches(twice)


def dying(index: int) -> tuple[Tensor, int]:
    """Record at which a worker is killed, as by the system when memory runs out."""
    if index > 1 and torch.utils.data.get_worker_info() is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return torch.full((4,), float(index)), index % 2


def test_a_step_whose_worker_is_killed_is_not_charged_and_can_be_run_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch asks every five seconds, which is the default of an argument, whether a worker lives
    asking = _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(asking, "__defaults__", (0.1,))
    data, step = Items(dying), step_for(8)
    batch = next(step.batches(hush.Source(data, workers=1)))
    for _ in range(2):
        with pytest.raises(DataError, match=r"worker process failed.*not charged"):
            step(batch)
    assert step.steps == 0
    assert not step.ledger.counts
    again = next(step.batches(data))
    assert torch.equal(again.indices, batch.indices)
    assert step(again)


@pytest.mark.parametrize("missing", [[4], [0, 1, 2]])
def test_an_empty_slot_is_not_read(missing: list[int]) -> None:
    present = all_but(8, *missing)
    sums = []
    for data in (files(missing), files()):
        step = step_for(8)
        batch = next(step.batches(data, present=present))
        step.pending_batch = batch = Batch(torch.arange(8), batch.data, 3, batch.present)
        sums.append(step.clipped_sum(batch).clone())
    assert torch.equal(*sums)


@pytest.mark.parametrize("selective", [False, True])
def test_a_label_that_is_no_class_is_not_shown(selective: bool) -> None:
    data = Items(lambda index: (torch.full((4,), float(index)), 4711 if index == 6 else 0))
    step = step_for(8)
    if selective:
        test = hush.Selective(rate=1.0, clip=1.0, multiplier=1.0, threshold=0.0)
        rare = replace(step.plan, sampling=hush.Poisson(0.01), release=test)
        step = step_for(8, plan=rare)
    reading = (step(batch) for batch in step.batches(data, steps=20))
    with pytest.raises(DataError, match="private and not shown") as raised:
        list(reading)
    assert "4711" not in str(raised.value)
