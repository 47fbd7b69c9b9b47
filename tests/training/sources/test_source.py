"""Records of every kind of source, read one at a time: what reaches a row, and what does not."""

import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import hush
from hush.core.errors import DataError, InvalidValue
from hush.core.randomness import Stream
from hush.training.data import Batch, Data, count, prepare, take

LENGTHS = [3, 1, 5, 2, 4, 2]
KEY = bytes(range(32))


class Sentences(Dataset[Any]):
    """Ragged records, as lists of tokens: record i has LENGTHS[i] of them, all i + 1."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        return [index + 1] * LENGTHS[index], index % 2


def pad_to_longest(records: list[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
    """As people write it: padded to the longest of the batch, with a mask."""
    rows = [torch.tensor(tokens) for tokens, _ in records]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"tokens": tokens, "mask": tokens > 0}, torch.tensor([label for _, label in records])


class Noisy:
    """Records to which each generator that people use adds something."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        draws = [float(torch.rand(())), np.random.rand(), random.random()]  # noqa: NPY002
        return torch.tensor([index, *draws]), index % 2


def batches(data: Data, slots: list[int], physical: int, key: bytes = KEY) -> Iterator[tuple[Any, Any]]:
    """Physical batches of some slots as a step gets them."""
    parts = Batch(torch.tensor(slots), data, physical).physical_batches(Stream(torch.device("cpu"), key))
    return ((inputs, targets) for inputs, targets, _, _ in parts)


def rows(data: Data, slots: list[int], physical: int, key: bytes = KEY) -> list[list[float]]:
    """Inputs of some slots."""
    return [row for inputs, _ in batches(data, slots, physical, key) for row in inputs.tolist()]


def test_a_collate_function_that_pads_to_the_longest_sees_one_record() -> None:
    source = hush.Source(Sentences(), collate_fn=pad_to_longest, pad_to=(4, None))
    for slots in ([0], [0, 2], [0, 1, 2, 3, 4, 5]):
        inputs, targets = take(source, torch.tensor(slots))
        assert inputs["tokens"].shape == (len(slots), 4)
        assert inputs["tokens"][0].tolist() == [1, 1, 1, 0]
        assert inputs["mask"][0].tolist() == [True, True, True, False]
        assert targets.tolist() == [slot % 2 for slot in slots]
    cut, _ = take(source, torch.tensor([2]))
    assert cut["tokens"].tolist() == [[3, 3, 3, 3]]


@pytest.mark.parametrize("physical", [1, 2])
def test_a_shape_that_follows_the_record_is_refused_and_not_shown(physical: int) -> None:
    source = prepare(Sentences(), collate_fn=pad_to_longest)
    with pytest.raises(DataError, match=r"another shape or type .* pad_to= a public length") as raised:
        list(batches(source, [0, 2], physical))
    assert not any(str(length) in str(raised.value) for length in LENGTHS)


def test_parts_of_a_record_have_paddings_of_their_own() -> None:
    def tagged(records: list[tuple[list[int], int]]) -> tuple[dict[str, Tensor], Tensor]:
        tokens = torch.tensor([records[0][0]])
        return {"x": tokens, "length": torch.tensor([tokens.shape[1]])}, tokens > 1

    source = hush.Source(
        Sentences(), collate_fn=tagged, pad_to=({"x": 4}, 5), pad_value=({"x": 9}, True)
    )
    inputs, targets = source.take([1])
    assert inputs["x"].tolist() == [[2, 9, 9, 9]]
    assert inputs["length"].tolist() == [1]
    assert targets.tolist() == [[True] * 5]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_record_draws_is_a_function_of_the_step_and_its_slot(workers: int) -> None:
    torch.manual_seed(3)
    np.random.seed(3)  # noqa: NPY002
    random.seed(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]  # noqa: NPY002
    alone = {slot: rows(Noisy(), [slot], 1)[0] for slot in range(8)}
    assert len({tuple(row[1:]) for row in alone.values()}) == 8, "no two slots draw the same"
    source = prepare(Noisy(), workers=workers)
    for slots in ([0, 1, 2, 3, 4, 5, 6, 7], [7, 3], [3, 4, 6]):
        for physical in (1, 3, 8):
            assert rows(source, slots, physical) == [alone[slot] for slot in slots]
    other = rows(source, [3], 1, bytes(32))[0]
    assert all(ours != theirs for ours, theirs in zip(other[1:], alone[3][1:], strict=True))
    # and the program's own generators are as they were
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[index]  # noqa: NPY002
    assert random.getstate() == before[2]


def test_a_collate_function_that_draws_has_the_record_s_numbers() -> None:
    def masked(records: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
        noise = torch.rand(len(records), 4)
        return noise, torch.tensor([label for _, label in records])

    source = prepare(Noisy(), collate_fn=masked)
    whole = rows(source, list(range(8)), 8)
    assert rows(source, [5], 1) == [whole[5]]
    assert len({tuple(row) for row in whole}) == 8


class OwnGenerator(Noisy):
    """The generator is the data set's, as people are told to do elsewhere."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        row = torch.tensor([index, 1.0, 2.0, 3.0])
        return row if self.generator.random() < 0.5 else -row, index % 2


def step_for(records: int, width: int = 4, plan: Any = None, **options: Any) -> hush.PrivateStep:
    torch.manual_seed(0)
    model = torch.nn.Linear(width, 2)
    plan = plan or hush.Plan(
        sampling=hush.Poisson(rate=0.5), clipping=hush.L2(norm=1.0), noise=hush.Gaussian(multiplier=1.0)
    )
    return hush.PrivateStep(
        model,
        torch.nn.CrossEntropyLoss(),
        torch.optim.SGD(model.parameters(), lr=0.1),
        plan,
        records=records,
        generator=torch.Generator().manual_seed(1),
        **options,
    )


def test_a_generator_of_the_data_set_s_own_is_refused() -> None:
    with pytest.raises(DataError, match="came out different when it was read again"):
        step_for(8).batches(OwnGenerator())
    step_for(8).batches(Noisy())


class Files:
    """Records in files, of which some are missing: an error names the person."""

    def __init__(self, missing: list[int]) -> None:
        self.missing = missing

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index in self.missing:
            Path(f"/nowhere/alice-{index}.txt").read_text()
        return torch.full((4,), float(index)), index % 2


@pytest.mark.parametrize("workers", [0, 2])
def test_an_error_of_a_record_shows_nothing_of_it(workers: int) -> None:
    source = prepare(Files([5]), workers=workers)
    for _ in range(2):  # workers that were left with unread batches do not spoil the next list
        with pytest.raises(DataError, match=r"FileNotFoundError in test_source.py, line \d+") as raised:
            rows(source, list(range(8)), 2)
        assert "alice" not in str(raised.value)
        assert raised.value.__context__ is None
        assert rows(source, [6, 0], 2) == [[6.0] * 4, [0.0] * 4]


def test_a_step_that_meets_an_unreadable_record_is_not_charged() -> None:
    step = step_for(8)
    reading = (step(batch) for batch in step.batches(Files([3]), steps=20))
    with pytest.raises(DataError, match="could not be read"):
        list(reading)
    assert step.ledger.counts.get(step.plan, 0) == step.steps < 20


@pytest.mark.parametrize("missing", [[0], [4], [0, 1, 2]])
def test_an_empty_slot_is_not_read(missing: list[int]) -> None:
    present = torch.ones(8, dtype=torch.bool)
    present[missing] = False
    sums = []
    for data in (Files(missing), Files([])):
        step = step_for(8)
        batch = next(step.batches(data, present=present))
        step.pending_batch = batch = Batch(torch.arange(8), batch.data, 3, batch.present)
        sums.append(step.clipped_sum(batch).clone())
    assert torch.equal(*sums)


def test_what_an_empty_row_of_an_array_holds_counts_for_nothing() -> None:
    present = torch.arange(8) != 3
    sums = []
    for content, label in ((0.0, 0), (np.nan, -7)):
        x, y = np.ones((8, 4), dtype=np.float32), np.arange(8) % 2
        x[3], y[3] = content, label
        step = step_for(8)
        source = hush.Source((x, y), present=present)
        step.pending_batch = batch = Batch(torch.arange(8), source, 3, present)
        step.probe(source)
        sums.append(step.clipped_sum(batch).clone())
    assert torch.equal(*sums)


@pytest.mark.parametrize("selective", [False, True])
def test_a_label_that_is_no_class_is_not_shown(selective: bool) -> None:
    class Mislabelled(Files):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return super().__getitem__(index)[0], 4711 if index == 6 else 0

    step = step_for(8)
    if selective:
        test = hush.Selective(rate=1.0, clip=1.0, multiplier=1.0, threshold=0.0)
        rare = replace(step.plan, sampling=hush.Poisson(rate=0.01), release=test)
        step = step_for(8, plan=rare)
    reading = (step(batch) for batch in step.batches(Mislabelled([]), steps=20))
    with pytest.raises(DataError, match="private and not shown") as raised:
        list(reading)
    assert "4711" not in str(raised.value)


def test_a_source_keeps_its_workers_and_says_which_slots_are_empty() -> None:
    present = torch.arange(8) != 0
    source = hush.Source(Files([0]), workers=1, present=present)
    assert prepare(source) is source
    step = step_for(8)
    assert next(step.batches(source)).present is present
    with pytest.raises(DataError, match="boolean tensor with 8 entries"):
        prepare(source, torch.ones(7, dtype=torch.bool))


def test_only_the_physical_batches_at_hand_are_read() -> None:
    asked: list[int] = []

    class Counted(Noisy):
        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            asked.append(index)
            return super().__getitem__(index)

    source = prepare(Counted())
    source[0]
    asked.clear()
    for number, _ in enumerate(batches(source, list(range(8)), 2)):
        assert asked == list(range(2 * number + 2))


class Processes(Noisy):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.tensor([float(os.getpid())]), 0


def test_workers_read_and_live_on_from_step_to_step() -> None:
    source = prepare(Processes(), workers=2)
    seen = [{row[0] for row in rows(source, list(range(8)), physical)} for physical in (2, 8, 3)]
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0]) == 2, "one physical batch is work for both"
    assert os.getpid() not in seen[0]


def test_two_lists_read_in_turns_do_not_mix() -> None:
    source = prepare(Files([]), workers=1)
    first, second = batches(source, [0, 1, 2, 3], 1), batches(source, [7, 6, 5, 4], 1)
    seen = [(int(a[0, 0]), int(b[0, 0])) for (a, _), (b, _) in zip(first, second, strict=True)]
    assert seen == [(0, 7), (1, 6), (2, 5), (3, 4)]


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Counted(Endless):
    def __len__(self) -> int:
        return 3


@pytest.mark.parametrize(
    "stream",
    [Endless(), Counted(), DataLoader(TensorDataset(torch.zeros(3))), iter([1, 2]), [1, 2]],
    ids=["stream", "stream with a length", "loader", "iterator", "list"],
)
def test_what_has_no_numbered_records_is_refused(stream: Any) -> None:
    for read in (count, prepare, step_for(3).batches):
        with pytest.raises(DataError, match="no sampling, no charge"):
            read(stream)


def test_how_records_are_read_is_said_once() -> None:
    with pytest.raises(InvalidValue, match=r"Pass them to hush\.Source"):
        step_for(6).batches(hush.Source(Sentences()), collate_fn=pad_to_longest)
    for wrong in ({"workers": -1}, {"collate_fn": 3}, {"pad_to": (0, None)}, {"pad_to": "long"}):
        with pytest.raises(InvalidValue):
            hush.Source(Sentences(), **wrong)


@pytest.mark.parametrize(
    ("collate_fn", "message"),
    [
        (lambda records: torch.zeros(1), "not a pair"),
        (lambda records: (torch.zeros(4), torch.zeros(1)), "first dimension is not 1"),
        (lambda records: (torch.zeros(1, 4), "label"), "a str where a tensor is needed"),
        (lambda records: (torch.zeros(1, 4), {}), "no input or no target"),
        (lambda records: {"x": torch.zeros(1, 4)}, "which of them is to be predicted"),
    ],
)
def test_what_a_collate_function_returns_is_checked(collate_fn: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        prepare(Sentences(), collate_fn=collate_fn)[0]
