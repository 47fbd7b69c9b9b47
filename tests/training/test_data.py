from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from hush.core.errors import DataError
from hush.training.data import Batch, Data, count, take
from tests.training.helpers import all_but, step_of

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)


class Squares:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return X[index], int(Y[index])


@pytest.mark.parametrize("data", [(X, Y), TensorDataset(X, Y), Squares()])
def test_every_kind_of_data_gives_the_same_records(data: Data) -> None:
    assert count(data) == 6
    inputs, targets = take(data, torch.tensor([4, 0]))
    assert inputs.tolist() == [[8.0, 9.0], [0.0, 1.0]]
    assert targets.tolist() == [4, 0]


def test_a_record_may_have_several_inputs() -> None:
    class Named(Squares):
        def __getitem__(self, index: int) -> tuple[dict[str, torch.Tensor], int]:  # type: ignore[override]
            return {"x": X[index], "y": X[index] + 1}, int(Y[index])

    for data in (({"x": X, "y": X + 1}, Y), Named()):
        assert count(data) == 6
        inputs, targets = take(data, torch.tensor([4, 0]))
        assert inputs["y"].tolist() == [[9.0, 10.0], [1.0, 2.0]]
        assert targets.tolist() == [4, 0]
    with pytest.raises(DataError, match="6 and 5 inputs and 6 targets"):
        count(((X, X[:5]), Y))


def test_data_without_numbered_records_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    with pytest.raises(DataError, match="Stream has no numbered records"):
        count(Stream())  # type: ignore[arg-type]


def test_rows_that_do_not_match_are_refused() -> None:
    with pytest.raises(DataError, match="6 inputs and 5 targets"):
        count((X, Y[:5]))
    with pytest.raises(DataError, match="Tensor, Tensor, Tensor: pass a pair"):
        count((X, Y, Y))


class Rows:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.rows[index], index


UNUSABLE = {
    "no number": (X[:, :0], r"a tensor of shape \(0,\), without a number"),
    "sparse": (X.to_sparse(), r"\.to_dense\(\)"),
    "meta": (X.to("meta"), "meta tensor"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
@pytest.mark.parametrize("read", [lambda rows: (rows, Y), lambda rows: Rows(rows)])
def test_tensors_without_dense_numbers_are_refused_before_any_work(kind: str, read: Any) -> None:
    rows, message = UNUSABLE[kind]
    step = step_of(torch.nn.Linear(2, 3), records=6)
    with pytest.raises(DataError, match=message):
        step.batches(read(rows))


class Images:
    """Records that differ in more than their length."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.zeros(3, 30 + index), index


class Named(Images):
    """Records whose inputs have several names."""

    def __getitem__(self, index: int) -> Any:
        return {f"secret {index}": torch.zeros(2)}, index


@pytest.mark.parametrize("data", [Images(), Named()])
def test_records_that_cannot_be_stacked_are_refused_and_not_shown(data: Data) -> None:
    with pytest.raises(DataError, match="another structure, type or shape than the first") as raised:
        take(data, torch.tensor([0, 1]))
    told = str(raised.value)
    assert raised.value.__context__ is None
    assert not any(private in told for private in ("30", "31", "secret"))


TEN = torch.arange(10.0)[:, None], torch.arange(10)
DRAWN = torch.tensor([1, 4, 5, 8, 9])


def test_physical_batches_cover_the_logical_one_in_order() -> None:
    batch = Batch(DRAWN, TEN, physical=2)
    parts = [(inputs.flatten().tolist(), targets.tolist()) for inputs, targets, _, _ in batch]
    assert parts == [([1, 4], [1, 4]), ([5, 8], [5, 8]), ([9], [9])]
    assert len(batch) == 5
    assert all(present is None for _, _, present, _ in batch)


def test_an_empty_slot_keeps_its_place() -> None:
    parts = [
        (inputs.flatten().tolist(), occupied.tolist())
        for inputs, _, occupied, _ in Batch(DRAWN, TEN, physical=2, present=all_but(10, 4))
        if occupied is not None
    ]
    assert parts == [([1, 4], [True, False]), ([5, 8], [True, True]), ([9], [True])]
