"""Records of every kind of source, read one at a time: what reaches a row, and what does not."""

import gc
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import default_collate

import hush
from hush.core.errors import DataError, Unsupported
from hush.training.data import prepare, ragged, take
from tests.training.helpers import plan_of, run, step_of
from tests.training.sources.problems import (
    Bag,
    Items,
    batches,
    files,
    noisy,
    pad_to_longest,
    rows,
    step_for,
)

LENGTHS = [3, 1, 5, 2, 4, 2]


@pytest.fixture(autouse=True)
def _workers_of_this_test_alone() -> None:
    """A step is part of a reference cycle, and so are the workers that its last batch refers to."""
    gc.collect()


SENTENCES = Items(lambda index: ([index + 1] * LENGTHS[index], index % 2), len(LENGTHS))
"""Ragged records, as lists of tokens: record i has LENGTHS[i] of them, all i + 1."""


def test_a_collate_function_that_pads_to_the_longest_sees_one_record() -> None:
    source = hush.Source(SENTENCES, collate_fn=pad_to_longest, pad_to=(4, None))
    for slots in ([0], [0, 2], [0, 1, 2, 3, 4, 5]):
        inputs, targets = take(source, torch.tensor(slots))
        assert inputs["words"].shape == (len(slots), 4)
        assert inputs["words"][0].tolist() == [1, 1, 1, 0]
        assert inputs["mask"][0].tolist() == [True, True, True, False]
        assert targets.tolist() == [slot % 2 for slot in slots]
    cut, _ = take(source, torch.tensor([2]))
    assert cut["words"].tolist() == [[3, 3, 3, 3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_ragged_records_are_padded_to_the_longest_of_their_physical_batch(workers: int) -> None:
    source = hush.Source(SENTENCES, collate_fn=pad_to_longest, workers=workers, pad_to="longest")
    read = list(batches(source, [0, 1, 3, 2], 3))
    assert [inputs["words"].tolist() for inputs, _ in read] == [
        [[1, 1, 1], [2, 0, 0], [4, 4, 0]],
        [[3, 3, 3, 3, 3]],
    ]
    assert read[0][0]["mask"].tolist() == [[True] * 3, [True, False, False], [True, True, False]]
    assert ragged(source)


def test_records_of_another_length_are_refused_without_pad_to() -> None:
    source = hush.Source(SENTENCES, collate_fn=pad_to_longest)
    with pytest.raises(DataError, match=r'in length.*pad_to="longest"'):
        take(source, torch.tensor([0, 1, 3, 2]))


@pytest.mark.parametrize("masked", [True, False])
def test_padding_to_the_longest_needs_a_model_that_ignores_padding(masked: bool, tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    step = step_of(Bag(masked=masked), plan_of(hush.Poisson(0.5)), records=6, ledger=path)
    source = hush.Source(SENTENCES, collate_fn=pad_to_longest, pad_to="longest")
    if not masked:
        with pytest.raises(Unsupported, match="depends on its padding"):
            step.batches(source)
        return
    run(step, source, 3)
    assert step.spent(1e-2).arithmetic == "assumed"
    assert path.read_text().count('"arithmetic": "assumed"') == 3, "for any draw"


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_record_draws_is_a_function_of_the_step_and_its_slot(workers: int) -> None:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]  # noqa: NPY002
    alone = {slot: rows(Items(noisy), [slot], 1)[0] for slot in range(8)}
    assert len({tuple(row[1:]) for row in alone.values()}) == 8, "no two slots draw the same"
    source = prepare(hush.Source(Items(noisy), workers=workers))
    for slots in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 3], [3, 4, 6]):
        for physical in (1, 3, 8):
            assert rows(source, slots, physical) == [alone[slot] for slot in slots]
    other = rows(source, [3], 1, bytes(32))[0]
    assert all(ours != theirs for ours, theirs in zip(other[1:], alone[3][1:], strict=True))
    # and the program's own generators are as they were
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]  # noqa: NPY002
    assert random.getstate() == before[2]


def test_a_source_keeps_its_workers_and_says_which_slots_are_empty() -> None:
    present = torch.arange(8) != 0
    source = hush.Source(files([0]), workers=1, present=present)
    assert prepare(source) is source
    step = step_for(8)
    assert next(step.batches(source)).present is present
    with pytest.raises(DataError, match="boolean tensor with 8 entries"):
        prepare(source, torch.ones(7, dtype=torch.bool))


@pytest.mark.parametrize(
    ("collate_fn", "message"),
    [
        (lambda records: torch.zeros(1), "not a pair"),
        (lambda records: (torch.zeros(4), torch.zeros(1)), "first dimension other than 1"),
        (lambda records: (torch.zeros(1, 4), "label"), "a str instead of a tensor"),
        (lambda records: {"x": torch.zeros(1, 4)}, "no target was named"),
        (lambda records: default_collate([]), "could not be read: IndexError"),
    ],
)
def test_what_a_collate_function_returns_is_checked(collate_fn: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(hush.Source(SENTENCES, collate_fn=collate_fn))[0]


def drawing(numbers: int) -> Items:
    """Records that each draw some numbers of every generator."""

    def item(index: int) -> tuple[Tensor, int]:
        torch.rand(numbers)
        np.random.rand(numbers)  # noqa: NPY002
        for _ in range(numbers):
            random.random()
        return torch.ones(2), index % 2

    return Items(item)


def test_how_often_a_record_draws_does_not_stay_in_the_programs_generators() -> None:
    """Their states are saved with checkpoints: a draw for each word would show a record's length."""

    states = []
    for words in (1, 50):
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002
        random.seed(0)
        source = hush.Source(drawing(words))
        source[0]
        source.take([1, 2])
        list(source.batches([torch.tensor([3]), torch.tensor([4, 5])], None))
        states.append((torch.rand(()), np.random.rand(), random.random()))  # noqa: NPY002
    assert states[0] == states[1]
