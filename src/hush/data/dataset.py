"""A data set as a value: inputs and labels, split into a private training part and a test part."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Dataset:
    """Inputs and labels of the two parts, scaled with public constants only.

    Scaling by a mean or a maximum of the training records would release that number without paying
    for it, so every reader uses constants that are known before the data are seen.
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
                    "together: there must be one row of inputs and one label a record."
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


def tensors(dataset: Dataset) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """x_train, y_train, x_test, y_test as tensors that share the arrays' memory.

    Args:
        dataset: as `load` or `with_features` returns it.
    """
    import torch  # here: the readers need no torch

    return (
        torch.from_numpy(dataset.x_train),
        torch.from_numpy(dataset.y_train),
        torch.from_numpy(dataset.x_test),
        torch.from_numpy(dataset.y_test),
    )


def public_order(count: int) -> NDArray[np.int64]:
    """A permutation of 0 to count - 1 that depends on `count` alone, never on the records.

    >>> [int(i) for i in public_order(5)]
    [3, 2, 1, 0, 4]
    """
    # NumPy promises a stable stream for the raw words of a bit generator, not for `permutation`.
    words = np.random.PCG64(0).random_raw(count)
    return np.argsort(words, kind="stable").astype(np.int64)


def unit_pixels(images: NDArray[Any], brightest: int = 255) -> NDArray[np.float32]:
    """The images as float32 in [0, 1]: divided by the largest value a pixel can have.

    The usual subtraction of the data set's mean is left out: that mean is a statistic of the
    private records.
    """
    scaled = images.astype(np.float32, order="C")
    scaled /= np.float32(brightest)
    return scaled
