"""The data sets by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from hush.core.errors import DataError
from hush.data.adult import read_adult
from hush.data.dataset import Dataset
from hush.data.images import read_cifar10, read_digits, read_mnist
from hush.data.imdb import read_imdb
from hush.data.published import find_directory

_READERS: dict[str, Callable[[Path], Dataset]] = {
    "mnist": partial(read_mnist, "mnist"),
    "fashion-mnist": partial(read_mnist, "fashion-mnist"),
    "cifar10": read_cifar10,
    "adult": read_adult,
    "imdb": read_imdb,
}

NAMES: tuple[str, ...] = ("digits", *_READERS)


def load(name: str, directory: str | Path | None = None) -> Dataset:
    """The data set called `name`, read from its published files.

    Files are checked against their published sha256 sums; a missing or damaged one raises a
    `DataError` that says which files belong where.

    Args:
        name: one of `hush.data.NAMES`. `digits` needs no files.
        directory: with the files; None: the environment's HUSH_DATA.

    Returns:
        Training and test records, scaled with public constants.

    >>> load("digits")
    Dataset(digits: 1437 training and 360 test records of 1 x 8 x 8, 10 classes)
    """
    if name == "digits":
        return read_digits()
    if name not in _READERS:
        raise DataError(f"there is no data set called {name!r}; there are {', '.join(NAMES)}.")
    return _READERS[name](find_directory(name, directory))
