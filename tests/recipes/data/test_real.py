"""The published files themselves, where they are at hand."""

import os
from pathlib import Path

import numpy as np
import pytest

from hush.data import Dataset, load
from hush_recipes.data.images import write_cifar10_npz


def counts(dataset: Dataset) -> tuple[list[int], list[int]]:
    return np.bincount(dataset.y_train).tolist(), np.bincount(dataset.y_test).tolist()


def check_images(dataset: Dataset, shape: tuple[int, ...], train: int, test: int) -> None:
    assert dataset.x_train.shape == (train, *shape)
    assert dataset.x_test.shape == (test, *shape)
    assert dataset.classes == 10
    for x in (dataset.x_train, dataset.x_test):
        assert x.dtype == np.float32
        assert x.flags.c_contiguous
        assert (x.min(), x.max()) == (0, 1)


@pytest.mark.real_data("mnist")
def test_mnist() -> None:
    mnist = load("mnist")
    check_images(mnist, (1, 28, 28), 60_000, 10_000)
    train, test = counts(mnist)
    assert train == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert test == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.real_data("fashion-mnist")
def test_fashion_mnist() -> None:
    fashion = load("fashion-mnist")
    check_images(fashion, (1, 28, 28), 60_000, 10_000)
    assert counts(fashion) == ([6000] * 10, [1000] * 10)


@pytest.mark.real_data("adult")
def test_adult() -> None:
    adult = load("adult")
    assert adult.x_train.shape == (32_561, 104)
    assert adult.x_test.shape == (16_281, 104)
    assert counts(adult) == ([24_720, 7_841], [12_435, 3_846])
    assert adult.x_train.dtype == np.float32
    assert (adult.x_train.min(), adult.x_train.max()) == (0, 1)


@pytest.mark.real_data("imdb")
def test_imdb() -> None:
    imdb = load("imdb")
    assert imdb.x_train.shape == imdb.x_test.shape == (25_000, 256)
    assert counts(imdb) == ([12_500] * 2, [12_500] * 2)
    assert (imdb.x_train.min(), imdb.x_train.max()) == (0, 9_999)
    # Sorted by class, the first thousand would all be of one.
    assert 400 < imdb.y_train[:1000].sum() < 600
    words = imdb.x_train != 0
    assert words.any(axis=1).all()
    assert (np.diff(words.astype(int), axis=1) <= 0).all()


@pytest.mark.slow
@pytest.mark.real_data("cifar10")
def test_cifar10_and_its_unpacked_copy(tmp_path: Path) -> None:
    directory = Path(os.environ["HUSH_DATA"])
    cifar10 = load("cifar10")
    check_images(cifar10, (3, 32, 32), 50_000, 10_000)
    assert counts(cifar10) == ([5000] * 10, [1000] * 10)
    if not (directory / "cifar10" / "images.med.xz").is_file():
        pytest.skip("the compact copy is not at hand")
    write_cifar10_npz(directory, tmp_path)
    reread = load("cifar10", tmp_path)
    assert np.array_equal(reread.x_train, cifar10.x_train)
    assert np.array_equal(reread.y_test, cifar10.y_test)
