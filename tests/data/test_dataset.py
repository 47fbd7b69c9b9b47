import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hush.core.errors import DataError
from hush.data import Dataset, load, names, read_owners, tensors, with_features
from hush.data.dataset import public_order, unit_pixels
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


def test_the_digits_never_change() -> None:
    digits = load("digits")
    assert (digits.x_train.shape, digits.x_test.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    labels = np.concatenate([digits.y_train, digits.y_test])
    assert np.bincount(labels).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(digits.y_test).min() >= 25
    assert np.array_equal(load("digits").x_train, digits.x_train)


def test_without_other_distributions_the_digits_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.core.extensions.entry_points", lambda **_: ())
    assert names() == ("digits",)
    with pytest.raises(DataError, match=r"'mnist'. There are digits\. .*pip install ./recipes"):
        load("mnist")
    with pytest.raises(DataError, match=r"There are none that is installed\. .*pip install ./recipes"):
        with_features(tiny(), "scattering")


def test_a_text_file_and_an_array_give_the_same_units(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("ann\n bob\nann \r\nbob\nann\n", encoding="utf-8")
    np.save(tmp_path / "ids.npy", np.array([7, 9, 7, 9, 7]))
    units = [UnitTable.of(read_owners(tmp_path / name, 5), 2) for name in ("ids.txt", "ids.npy")]
    assert units[0].digest == units[1].digest
    assert units[0].counts.tolist() == [3, 2]


def test_a_byte_order_mark_does_not_split_the_first_user(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("ann\nbob\nann\n", encoding="utf-8-sig")
    assert read_owners(tmp_path / "ids.txt", 3).tolist() == ["ann", "bob", "ann"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("ann\nbob\n", r"shape \(2,\) and there are 3"),
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


def test_files_that_hold_no_ids_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, {}, {}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "two.npy", np.zeros((3, 2), dtype=np.int64))
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00")
    (tmp_path / "binary.txt").write_bytes(b"ann\n\xff\xfe\n\n")
    for name, said in {
        "objects.npy": "reading them could run code",
        "two.npy": r"shape \(3, 2\)",
        "short.npy": "np.save",
        "binary.txt": "UTF-8",
        "missing.txt": "No such file",
        ".": "cannot be read",
    }.items():
        with pytest.raises(DataError, match=said):
            read_owners(tmp_path / name, 3)
