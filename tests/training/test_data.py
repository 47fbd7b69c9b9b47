"""Data that a step takes, data that raise before any work, and the physical batches of a draw."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from hush.core.errors import DataError
from hush.training.data import Batch, Data, count, take
from tests.training.helpers import all_but, step_of
from tests.training.sources.problems import Items

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


def rows_of(rows: torch.Tensor) -> Items:
    return Items(lambda index: (rows[index], index), 6)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_record_may_have_several_inputs() -> None:
    named = Items(lambda index: ({"x": X[index], "y": X[index] + 1}, index), 6)
    for data in (({"x": X, "y": X + 1}, Y), named):
        assert count(data) == 6
        inputs, targets = take(data, torch.tensor([4, 0]))
        assert inputs["y"].tolist() == [[9.0, 10.0], [1.0, 2.0]]
        assert targets.tolist() == [4, 0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (Stream(), "Stream has no numbered records"),
        ({"train": [1, 2], "test": [3]}, r"a dict with 'train', 'test' has no.*data\['train'\]"),
        ((X, Y[:5]), "6 inputs and 5 targets"),
        (((X, X[:5]), Y), "6 and 5 inputs and 6 targets"),
        ((X, Y, Y), "Tensor, Tensor, Tensor. Pass a pair"),
        (([torch.ones(2), torch.ones(3)], Y[:2]), "one per record.*pad records to one public length"),
        ((np.ma.masked_less(X.numpy(), 3.0), Y.numpy()), "masked entries.*filled"),
    ],
)
def test_data_without_numbered_records_is_refused(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        count(data)


UNUSABLE = {
    "no number": (X[:, :0], r"a record has an empty tensor of shape \(0,\)"),
    "sparse": (X.to_sparse(), r"\.to_dense\(\)"),
    "meta": (X.to("meta"), "meta tensor"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
@pytest.mark.parametrize("read", [lambda rows: (rows, Y), rows_of])
def test_tensors_without_dense_numbers_are_refused_before_any_work(kind: str, read: Any) -> None:
    rows, message = UNUSABLE[kind]
    step = step_of(torch.nn.Linear(2, 3), records=6)
    with pytest.raises(DataError, match=message):
        step.batches(read(rows))


@pytest.mark.parametrize(
    "data",
    [
        Items(lambda index: (torch.zeros(3, 30 + index), index), 6),
        Items(lambda index: ({f"secret {index}": X[0]}, index), 6),
    ],
)
def test_records_that_cannot_be_stacked_are_refused_and_not_shown(data: Data) -> None:
    with pytest.raises(DataError, match="structure, type or shape") as raised:
        take(data, torch.tensor([0, 1]))
    assert raised.value.__context__ is None
    assert not any(private in str(raised.value) for private in ("30", "31", "secret"))


def test_physical_batches_cover_the_logical_one_in_order_with_empty_slots() -> None:
    data, drawn = (torch.arange(10.0)[:, None], torch.arange(10)), torch.tensor([1, 4, 5, 8, 9])
    batch = Batch(drawn, data, physical=2)
    parts = list(batch.physical_batches())
    rows = [(inputs.flatten().tolist(), targets.tolist()) for inputs, targets, _, _ in parts]
    assert rows == [([1, 4], [1, 4]), ([5, 8], [5, 8]), ([9], [9])]
    assert len(batch) == 5
    assert all(present is None for _, _, present, _ in parts)
    masked = Batch(drawn, data, physical=2, present=all_but(10, 4))
    parts = list(masked.physical_batches())
    occupied = [present.tolist() for _, _, present, _ in parts if present is not None]
    assert occupied == [[True, False], [True, True], [True]]
    assert [targets.tolist() for _, targets, _, _ in parts] == [[1, 4], [5, 8], [9]]
