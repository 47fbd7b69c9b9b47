"""Data sets by name, and the owners of their records from a file."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError, shorten
from hush.core.extensions import choices, extensions

if TYPE_CHECKING:
    from torch import Tensor

_DIGITS_TRAINING = 1437
_SEPARATORS = (",", ";", "\t", "|")


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Inputs and labels of a private training part and a test part.

    Readers scale by public constants only: a mean or a maximum of the training records would be released
    without a charge.
    """

    name: str
    x_train: NDArray[Any]
    """float32 features, N x C x H x W for images; int64 token ids for text."""
    y_train: NDArray[np.int64]
    x_test: NDArray[Any]
    y_test: NDArray[np.int64]
    classes: int
    """Labels are 0 to classes - 1."""

    def __post_init__(self) -> None:
        for part, x, y in (
            ("training", self.x_train, self.y_train),
            ("test", self.x_test, self.y_test),
        ):
            if y.ndim != 1 or x.ndim < 2 or len(x) != len(y):
                raise DataError(
                    f"{self.name}: {part} inputs {x.shape} and labels {y.shape} do not belong "
                    "together. Pass one row of inputs and one label per record."
                )
            if len(y) == 0:
                raise DataError(f"{self.name}: there are no {part} records.")
            if y.min() < 0 or y.max() >= self.classes:
                raise DataError(
                    f"{self.name}: {part} labels go from {y.min()} to {y.max()}, "
                    f"but {self.classes} classes are numbered 0 to {self.classes - 1}."
                )
        if self.x_train.shape[1:] != self.x_test.shape[1:]:
            raise DataError(
                f"{self.name}: training records are {self.x_train.shape[1:]} but test records "
                f"{self.x_test.shape[1:]}; a model can take only one shape."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one record's input."""
        return tuple(self.x_train.shape[1:])

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        return (
            f"Dataset({self.name}: {len(self.y_train)} training and {len(self.y_test)} test "
            f"records of {shape}, {self.classes} classes)"
        )


def names() -> tuple[str, ...]:
    """Names for `load`: the bundled digits, and data sets of other distributions."""
    return ("digits", *extensions("datasets"))


def load(name: str, directory: str | Path | None = None) -> Dataset:
    """Read a data set by name.

    `pip install ./recipes` in a clone of hush adds the papers' data sets, which are read from their
    published files and checked against their sha256 sums.

    Args:
        name: One of `hush.data.names()`. `digits` needs no files.
        directory: Directory of the files. None: the environment's HUSH_DATA.

    Returns:
        Training and test records, scaled with public constants.

    >>> load("digits")
    Dataset(digits: 1437 training and 360 test records of 1 x 8 x 8, 10 classes)
    """
    if name == "digits":
        return _digits()
    readers = extensions("datasets")
    if name not in readers:
        raise DataError(f"No data set is called {name!r}. There are {choices('datasets', 'digits')}")
    dataset: Dataset = readers[name].load()(directory)
    return dataset


def with_features(
    dataset: Dataset,
    features: str,
    *,
    device: str = "cpu",
    cache: Path | None = None,
    directory: str | Path | None = None,
) -> Dataset:
    """Replace the inputs of a data set by fixed features, which are cached on disk.

    `pip install ./recipes` in a clone of hush adds `scattering` and `efficientnet-lite0`.

    **Guarantee.** The features of a record are a function of that record alone and of public constants:
    a guarantee for the records holds with their features as inputs.

    Args:
        dataset: Images, channels x side x side.
        features: Name of the features.
        device: Device that computes them.
        cache: Directory of the cached files, which are as private as the records. None: the
            environment's HUSH_CACHE, else `hush` below the user's cache directory.
        directory: Directory of published weights. None: the environment's HUSH_DATA.
    """
    makers = extensions("features")
    if features not in makers:
        raise DataError(f"No features are called {features!r}. There are {choices('features')}")
    made: Dataset = makers[features].load()(dataset, device=device, cache=cache, directory=directory)
    return made


def tensors(dataset: Dataset) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """x_train, y_train, x_test and y_test as tensors that share the memory of the arrays.

    Args:
        dataset: Data set, as `load` or `with_features` returns it.
    """
    import torch  # readers need no torch

    return (
        torch.from_numpy(dataset.x_train),
        torch.from_numpy(dataset.y_train),
        torch.from_numpy(dataset.x_test),
        torch.from_numpy(dataset.y_test),
    )


def public_order(count: int) -> NDArray[np.int64]:
    """Permutation of 0 to count - 1 that depends on `count` alone, never on the records.

    >>> [int(i) for i in public_order(5)]
    [3, 2, 1, 0, 4]
    """
    # NumPy promises a stable stream for the raw words of a bit generator, not for `permutation`.
    words = np.random.PCG64(0).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)


def unit_pixels(images: NDArray[Any], brightest: int = 255) -> NDArray[np.float32]:
    """Images as float32 in [0, 1], divided by the largest possible pixel.

    The mean of the data set is not subtracted: it is a statistic of the private records.
    """
    scaled = images.astype(np.float32, order="C")
    scaled /= np.float32(brightest)
    return scaled


def _digits() -> Dataset:
    """1,437 training and 360 test images of 1 x 8 x 8 in [0, 1]; the split is fixed and public."""
    from sklearn.datasets import load_digits

    bundled = load_digits()
    order = public_order(len(bundled.target))
    # Pixels count the dark points of a 4 x 4 patch, so 16 is the largest value.
    images = unit_pixels(bundled.images[order], brightest=16)[:, np.newaxis]
    labels = bundled.target[order].astype(np.int64)
    return Dataset(
        name="digits",
        x_train=images[:_DIGITS_TRAINING],
        y_train=labels[:_DIGITS_TRAINING],
        x_test=images[_DIGITS_TRAINING:],
        y_test=labels[_DIGITS_TRAINING:],
        classes=10,
    )


def read_owners(path: str | os.PathLike[str], records: int) -> NDArray[Any]:
    """Read the owner of each record from a text file with one id per line, or from a `.npy` array.

    Records with equal ids belong to one user. Empty lines and lines with several columns raise, because
    they would split a user into several.

    Args:
        path: File of ids in the order of the records. Blanks around an id are ignored.
        records: Number of records.

    Returns:
        Integers or names, as `PrivateStep(units=...)` takes them.
    """
    path = Path(path)
    try:
        owners = _from_npy(path) if path.suffix == ".npy" else _from_lines(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}). Name a file with one id per "
            "line, in the order of the records."
        ) from None
    if owners.shape != (records,):
        raise DataError(
            f"{path} has ids of shape {owners.shape} and there are {records} training records: the ids "
            "decide which records are clipped together. Write one id per record, without a heading."
        )
    return owners


def _from_npy(path: Path) -> NDArray[Any]:
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(
            f"{path} is no .npy file of integers or names ({shorten(str(error), 300)}). Objects are not "
            "loaded, as reading them could run code. Write it with np.save(path, np.asarray(ids))."
        ) from None


def _from_lines(path: Path) -> NDArray[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # without a byte-order mark before the first id
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}). Write one id per line."
        ) from None
    lines = [line.strip() for line in text.splitlines()]
    for number, line in enumerate(lines, start=1):
        if not line or any(separator in line for separator in _SEPARATORS):
            kind = "a row of several columns" if line else "empty"
            raise DataError(
                f"{path}, line {number}, is {kind}. Such ids would split a user into several who are "
                "protected separately. Write one id per line."
            )
    return np.asarray(lines, dtype=np.str_)
