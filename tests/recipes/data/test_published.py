"""Finding and checking files, on tiny data sets whose sums stand in for the published ones."""

import gzip
import hashlib
from pathlib import Path

import numpy as np
import pytest

from hush.core.errors import DataError
from hush.data import load, names
from hush_recipes.data.efficientnet import network
from hush_recipes.data.published import FILES, Published, read_published
from hush_recipes.gg.fig3 import read_votes

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


def test_the_environment_names_the_directory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HUSH_DATA", str(folder))
    assert load("mnist").name == "mnist"
    with pytest.raises(DataError, match="elsewhere is not there"):
        load("mnist", folder / "elsewhere")


def test_unpacked_files_are_taken_too(folder: Path) -> None:
    packed = folder / FILES["mnist"][0].path
    packed.with_suffix("").write_bytes(IMAGES)
    packed.unlink()
    assert load("mnist", folder).x_train.shape == (2, 1, 1, 2)
    packed.with_suffix("").write_bytes(IMAGES[:-1])
    with pytest.raises(DataError, match="train-images-idx3-ubyte is damaged"):
        load("mnist", folder)


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


def test_damaged_gzip_with_the_right_sum_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = FILES["mnist"][0].path
    cut = (folder / path).read_bytes()[:-9]
    (folder / path).write_bytes(cut)
    monkeypatch.setitem(FILES, "mnist", (Published(path, sha256(cut), "-"),))
    with pytest.raises(DataError, match="cannot be unpacked"):
        read_published("mnist", folder)


@pytest.mark.parametrize("name", [name for name in names() if name != "digits"])
def test_without_a_directory_the_files_are_listed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HUSH_DATA", raising=False)
    with pytest.raises(DataError, match="no data directory is given") as caught:
        load(name)
    for file in FILES[name]:
        assert str(Path("DATA") / file.path) in str(caught.value)
    assert ("cifar10.npz" in str(caught.value)) == (name == "cifar10")


@pytest.mark.parametrize("name", list(FILES))
def test_an_empty_directory_is_a_missing_file(name: str, tmp_path: Path) -> None:
    readers = {"pate-votes": read_votes, "efficientnet-lite0": network}
    with pytest.raises(DataError, match="is not there"):
        readers[name](tmp_path) if name in readers else load(name, tmp_path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(DataError, match="digits, adult, cifar10, fashion-mnist, imdb, mnist"):
        load("svhn")
