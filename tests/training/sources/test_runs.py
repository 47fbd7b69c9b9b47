"""Whole runs on sources: resumed, audited, evaluated, by several processes."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hush
from hush.core.errors import CheckpointError
from hush_recipes.audit.self_test import self_test
from tests.training import helpers
from tests.training.helpers import plan_of, seeded, step_of, weights_of
from tests.training.sources.problems import Bag, Items, pad_to_longest

RECORDS = 30
LENGTHS = [1 + index * 7 % 5 for index in range(RECORDS)]
PLAN = plan_of(hush.Poisson(0.5))


def sentences(first: int = 0) -> Items:
    """Ragged records that are augmented with every generator that people use."""

    def item(index: int) -> tuple[Tensor, int]:
        words = torch.randint(1, 20, (LENGTHS[index],))
        words[0] = 1 + (first + index + random.randrange(2) + np.random.randint(2)) % 19  # noqa: NPY002
        return words, (first + index) % 3

    return Items(item, RECORDS)


def train(folder: Path, steps: int, workers: int, resume: bool = False, data: Any = None) -> Tensor:
    torch.manual_seed(0)
    model = Bag()
    reading: Any = {"collate_fn": pad_to_longest, "workers": workers, "pad_to": (5, None)}
    helpers.train(
        model,
        PLAN,
        hush.Source(sentences(), **reading) if data is None else data,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.1),
        steps=steps,
        directory=folder,
        resume=resume,
        randomness=hush.Randomness(generator=None if resume else seeded(5)),
        evaluation=hush.Source(sentences(first=50), **reading),
        every=2,
        execution=hush.Execution(physical_batch=4),
    )
    return weights_of(model)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resumed_run_repeats_the_augmentation(workers: int, tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", 4, workers)
    train(tmp_path / "parts", 2, workers)
    assert torch.equal(train(tmp_path / "parts", 4, workers, resume=True), whole)


def test_a_run_is_not_resumed_on_other_records_of_a_data_set(tmp_path: Path) -> None:
    train(tmp_path, 2, 0)
    other = hush.Source(sentences(first=1), collate_fn=pad_to_longest, pad_to=(5, None))
    with pytest.raises(CheckpointError, match="first 8 records differ"):
        train(tmp_path, 4, 0, resume=True, data=other)


def test_a_step_on_a_source_does_what_is_charged() -> None:
    torch.manual_seed(0)
    step = step_of(Bag(), PLAN, seed=1, units=hush.Units(owners=[i // 3 for i in range(30)], per_unit=2))
    self_test(step, hush.Source(sentences(), collate_fn=pad_to_longest, pad_to=(5, None)))
