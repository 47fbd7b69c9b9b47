from pathlib import Path

import numpy as np
import pytest
import torch

from hush.core.errors import DataError
from hush.data import Dataset, load, public_order, read_owners, tensors
from hush.training.units import UnitTable


def tiny(**changes: object) -> Dataset:
    fields: dict[str, object] = {
        "name": "tiny",
        "x_train": np.zeros((3, 2), np.float32),
        "y_train": np.array([0, 1, 1]),
        "x_test": np.ones((1, 2), np.float32),
        "y_test": np.array([0]),
        "classes": 2,
    }
    return Dataset(**{**fields, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": np.array([0, 1])}, "do not match"),
        ({"y_train": np.array([[0], [1], [1]])}, "do not match"),
        ({"y_train": np.array([0, 1, 2])}, "range from 0 to 2"),
        ({"y_test": np.array([-1])}, "range from -1"),
        ({"x_test": np.ones((0, 2)), "y_test": np.array([], np.int64)}, "do not match"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        tiny(**changes)


def test_tensors_share_memory_and_keep_types() -> None:
    dataset = tiny()
    x_train, y_train, x_test, y_test = tensors(dataset)
    dataset.x_train[0, 0] = 7
    assert x_train[0, 0] == 7
    assert (x_train.dtype, y_train.dtype) == (torch.float32, torch.int64)
    assert (x_test.shape, y_test.shape) == ((1, 2), (1,))


@pytest.mark.parametrize("count", [0, 1, 2, 1797, 25_000])
def test_public_order_is_a_permutation(count: int) -> None:
    assert np.array_equal(np.sort(public_order(count)), np.arange(count))


def test_the_digits_never_change() -> None:
    digits = load("digits")
    assert (digits.x_train.shape, digits.x_test.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    labels = np.concatenate([digits.y_train, digits.y_test])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(digits.y_test).min() >= 25
    assert np.array_equal(load("digits").x_train, digits.x_train)


def test_a_text_file_and_an_array_give_the_same_units(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("ann\n bob\nann \r\nbob\nann\n", encoding="utf-8")
    np.save(tmp_path / "ids.npy", np.array([7, 9, 7, 9, 7]))
    units = [UnitTable.of(read_owners(tmp_path / name, 5), 2) for name in ("ids.txt", "ids.npy")]
    assert units[0].digest == units[1].digest
    assert units[0].counts.tolist() == [3, 2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("ann\nbob\n", r"shape \(2,\), but there are 3"),
        ("id\nann\nbob\nann\n", "without a heading"),
        ("ann,1\nbob,2\nann,3\n", "line 1, is a row of several columns"),
        ("ann\nbob\t2\nann\n", "line 2, is a row of several columns"),
        ("ann\nbob\nann|3\n", "line 3, is a row of several columns"),
        ("ann\n\nbob\n", "line 2, is empty"),
        ("", r"shape \(0,\)"),
    ],
)
def test_lines_that_are_not_one_id_a_record_are_refused(tmp_path: Path, content: str, said: str) -> None:
    """A whole row of a table is another one for every record: each would be protected on its own."""
    (tmp_path / "ids.txt").write_text(content)
    with pytest.raises(DataError, match=said):
        read_owners(tmp_path / "ids.txt", 3)
