from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from hush.core.errors import DataError
from hush.training.data import Data, count, take

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
    with pytest.raises(DataError, match="3 tensors"):
        count((X, Y, Y))


def test_arrays_are_told_to_become_tensors() -> None:
    with pytest.raises(DataError, match="kinds ndarray and Tensor, and gradients are taken of tensors"):
        count((np.zeros((3, 2)), torch.zeros(3)))
