"""Named data sets, user ids from files, and augmented views of images."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError, shorten
from hush.core.extensions import choices, extensions
from hush.core.value import check_count

if TYPE_CHECKING:
    from torch import Tensor

_DIGITS_TRAINING = 1437
_SEPARATORS = (",", ";", "\t", "|")


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Inputs and labels of private training records and of test records.

    Inputs are scaled only by public constants, because a mean of the training records would have a
    privacy cost.
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
        parts = {"training": (self.x_train, self.y_train), "test": (self.x_test, self.y_test)}
        for part, (x, y) in parts.items():
            if y.ndim != 1 or x.ndim < 2 or not len(x) == len(y) > 0:
                raise DataError(
                    f"{self.name}: {part} inputs {x.shape} and labels {y.shape} do not match. "
                    "Pass one row of inputs and one label per record."
                )
            if y.min() < 0 or y.max() >= self.classes:
                raise DataError(
                    f"{self.name}: {part} labels range from {y.min()} to {y.max()}, but labels of "
                    f"{self.classes} classes are 0 to {self.classes - 1}."
                )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the input of one record."""
        return tuple(self.x_train.shape[1:])

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape))
        counts = f"{len(self.y_train)} training and {len(self.y_test)} test records"
        return f"Dataset({self.name}: {counts} of {shape}, {self.classes} classes)"


def names() -> tuple[str, ...]:
    """Names of data sets for `load`: the bundled digits, and data sets of other installed packages."""
    return ("digits", *extensions("datasets"))


def load(name: str, directory: str | Path | None = None) -> Dataset:
    """Training and test records of a data set, scaled with public constants.

    `pip install ./recipes` in a clone of hush adds the data sets of the papers, whose files are verified
    by SHA-256.

    Args:
        name: One of `hush.data.names()`. `digits` needs no files.
        directory: Directory of the files; by default the environment variable HUSH_DATA.

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
    """Replace the inputs of a data set by features from fixed networks, which are cached on disk.

    `pip install ./recipes` in a clone of hush adds `scattering` and `efficientnet-lite0`.

    **Guarantee.** The features of a record depend only on that record and public constants. A guarantee
    for training on the features therefore holds for the records.

    Args:
        dataset: Data set of images of shape (channels, side, side).
        features: Name of the features.
        device: Device that computes the features.
        cache: Directory of the cached files, which are as private as the records; by default the
            environment variable HUSH_CACHE, or `hush` in the user's cache directory.
        directory: Directory of pretrained weights; by default the environment variable HUSH_DATA.
    """
    makers = extensions("features")
    if features not in makers:
        raise DataError(f"No features are called {features!r}. There are {choices('features')}")
    made: Dataset = makers[features].load()(dataset, device=device, cache=cache, directory=directory)
    return made


def tensors(dataset: Dataset) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """x_train, y_train, x_test and y_test as tensors that share the memory of the arrays.

    Args:
        dataset: Data set from `load` or `with_features`.
    """
    import torch

    arrays = dataset.x_train, dataset.y_train, dataset.x_test, dataset.y_test
    x_train, y_train, x_test, y_test = map(torch.from_numpy, arrays)
    return x_train, y_train, x_test, y_test


def public_order(count: int) -> NDArray[np.int64]:
    """Fixed permutation of 0 to count - 1, independent of the records.

    >>> [int(i) for i in public_order(5)]
    [3, 2, 1, 0, 4]
    """
    # NumPy guarantees a stable stream for the raw words of a bit generator, but not for `permutation`.
    words = np.random.PCG64(0).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)


def _digits() -> Dataset:
    """Digits: 1,437 training and 360 test images of 1 x 8 x 8 in [0, 1], with a fixed public split."""
    from sklearn.datasets import load_digits

    bundled = load_digits()
    order = public_order(len(bundled.target))
    # a pixel is the number of dark points in a 4 x 4 patch
    images = bundled.images[order].astype(np.float32, order="C")[:, np.newaxis] / np.float32(16)
    labels, split = bundled.target[order].astype(np.int64), _DIGITS_TRAINING
    parts = {"x_train": images[:split], "y_train": labels[:split]}
    parts |= {"x_test": images[split:], "y_test": labels[split:]}
    return Dataset(name="digits", classes=10, **parts)


def read_owners(path: str | os.PathLike[str], records: int) -> NDArray[Any]:
    """Read the user id of each record from a text file or a `.npy` array, for `hush.Units(owners=)`.

    Records with equal ids belong to one user. Empty lines and lines with several columns are errors,
    because they would split a user into several users.

    Args:
        path: File with one id per line, in the order of the records; surrounding whitespace is ignored.
        records: Number of records.
    """
    path = Path(path)
    try:
        if path.suffix == ".npy":
            owners = np.load(path, allow_pickle=False)
        else:
            lines = path.read_text(encoding="utf-8-sig").splitlines()
            owners = np.asarray([line.strip() for line in lines], dtype=np.str_)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{path} cannot be read ({shorten(str(error), 300)}). Pass a text file in UTF-8 with one id "
            "per line, in the order of the records, or an array saved by np.save without objects."
        ) from None
    for number, line in enumerate(owners.flat if owners.dtype.kind == "U" else (), start=1):
        if not line or any(separator in line for separator in _SEPARATORS):
            raise DataError(
                f"{path}, line {number}, is {'a row of several columns' if line else 'empty'}. Such ids "
                "would split a user into several users with separate guarantees. Write one id per line."
            )
    if owners.shape != (records,):
        raise DataError(
            f"{path} has ids of shape {owners.shape}, but there are {records} training records: the "
            "ids decide which records are clipped together. Write one id per record, without a heading."
        )
    return np.asarray(owners)


def flips_and_shifts(count: int, *, shift: int = 4) -> "Callable[[Tensor], Tensor]":
    """Create a function that returns augmented views of an image, for `PrivateStep(..., views=)`.

    The gradients of the `count` views are averaged before clipping, so each record has one gradient.
    Images have shape (channels, height, width), and views have shape (count, channels, height, width).
    Each view is shifted at random, and mirrored with probability 1/2.

    Args:
        count: Number of views per image.
        shift: Maximum shift in pixels.
    """
    import torch

    check_count("count", count, "a gradient is the mean of so many views", at_least=1, example=4)
    check_count("shift", shift, "it is a number of pixels", example=4)

    def views(image: "Tensor") -> "Tensor":
        _, height, width = image.shape
        padded = torch.nn.functional.pad(image, [shift] * 4)
        place = torch.randint(0, 2 * shift + 1, (2, count, 1), device=image.device)
        rows = place[0] + torch.arange(height, device=image.device)
        columns = place[1] + torch.arange(width, device=image.device)
        shifted = padded[:, rows[:, :, None], columns[:, None, :]].movedim(1, 0)
        mirrored = torch.rand(count, 1, 1, 1, device=image.device) < 0.5
        return torch.where(mirrored, shifted.flip(-1), shifted)

    # the name identifies the views when a run resumes
    views.__qualname__ = f"flips_and_shifts({count}, shift={shift})"
    return views
