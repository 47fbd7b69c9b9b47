import subprocess
import sys

import numpy as np
import pytest
import torch

from hush.core.errors import DataError
from hush.data import Dataset, tensors
from hush.data.dataset import public_order, unit_pixels


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


def test_shape_is_that_of_one_record() -> None:
    assert tiny().shape == (2,)
    assert "3 training and 1 test records of 2, 2 classes" in repr(tiny())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y_train": np.array([0, 1])}, "do not belong together"),
        ({"y_train": np.array([[0], [1], [1]])}, "do not belong together"),
        ({"y_train": np.array([0, 1, 2])}, "go from 0 to 2"),
        ({"y_test": np.array([-1])}, "go from -1"),
        ({"x_test": np.ones((1, 3), np.float32)}, "only one shape"),
        ({"x_test": np.ones((0, 2)), "y_test": np.array([], np.int64)}, "no test records"),
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


def test_reading_needs_no_torch() -> None:
    program = "import sys, hush.data; hush.data.load('digits'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, env={"PYTHONPATH": ":".join(sys.path)})


@pytest.mark.parametrize("count", [0, 1, 2, 1797, 25_000])
def test_public_order_is_a_permutation(count: int) -> None:
    assert np.array_equal(np.sort(public_order(count)), np.arange(count))


def test_public_order_never_changes() -> None:
    assert public_order(25_000)[:5].tolist() == [20554, 16026, 6037, 855, 921]


def test_pixels_reach_both_ends_and_are_contiguous() -> None:
    images = np.arange(256, dtype=np.uint8).reshape(1, 4, 8, 8).transpose(0, 3, 1, 2)
    scaled = unit_pixels(images)
    assert scaled.dtype == np.float32
    assert scaled.flags.c_contiguous
    assert (scaled.min(), scaled.max()) == (0, 1)
    assert np.allclose(scaled * 255, images)
