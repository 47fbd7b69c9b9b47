"""Finding and checking files, on tiny data sets whose sums stand in for the published ones."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from hush.core.errors import DataError
from hush.data import load
from hush_recipes.data.published import FILES, Published

IMAGES = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 2]) + bytes([0, 255, 51, 0])
LABELS = bytes([0, 0, 8, 1, 0, 0, 0, 2]) + bytes([3, 9])


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory with an mnist of two images a part."""
    files = []
    for file, content in zip(FILES["mnist"], [IMAGES, LABELS] * 2, strict=True):
        packed = gzip.compress(content, mtime=0)
        (tmp_path / file.path).parent.mkdir(exist_ok=True)
        (tmp_path / file.path).write_bytes(packed)
        files.append(Published(file.path, sha256(packed), sha256(content)))
    monkeypatch.setitem(FILES, "mnist", tuple(files))
    return tmp_path


def test_images_and_labels_come_back(folder: Path) -> None:
    dataset = load("mnist", folder)
    assert dataset.x_train.shape == (2, 1, 1, 2)
    assert dataset.x_train.dtype == np.float32
    assert dataset.x_train.ravel().tolist() == pytest.approx([0, 1, 0.2, 0])
    assert dataset.y_test.tolist() == [3, 9]
    assert dataset.y_test.dtype == np.int64


@pytest.mark.parametrize("content", [b"", b"something else"])
def test_a_wrong_file_is_refused_with_both_sums(folder: Path, content: bytes) -> None:
    file = FILES["mnist"][2]
    (folder / file.path).write_bytes(content)
    with pytest.raises(DataError, match="damaged or not the published one") as caught:
        load("mnist", folder)
    assert sha256(content) in str(caught.value)
    assert file.sha256 in str(caught.value)


def test_a_missing_file_says_what_to_put_where(folder: Path) -> None:
    (folder / FILES["mnist"][3].path).unlink()
    with pytest.raises(DataError, match=r"t10k-labels-idx1-ubyte\.gz is not there") as caught:
        load("mnist", folder)
    for file in FILES["mnist"]:
        assert str(folder / file.path) in str(caught.value)
    assert "--data-dir" in str(caught.value)
    assert "HUSH_DATA" in str(caught.value)
