"""Image data sets: MNIST, Fashion-MNIST and CIFAR-10.

CIFAR-10 is read from cifar10.npz, or decoded from a lossless compact copy, which takes some ten seconds
and 1.5 GB of memory at each load. `write_cifar10_npz` does it once and for all: its target becomes the
data directory, or its file joins the compact copy.
"""

import lzma
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError
from hush.data import Dataset
from hush_recipes.data.formats import parse_idx, parse_npz
from hush_recipes.data.published import (
    CIFAR10_PIXELS,
    FILES,
    check_sum,
    find_directory,
    read_bytes,
    read_published,
)

_CIFAR10_ARRAYS = ("x_train", "y_train", "x_test", "y_test")
_CIFAR10_TRAINING = 50_000
_SIDE = 32


def read_mnist(directory: str | Path | None = None, name: str = "mnist") -> Dataset:
    """60,000 training and 10,000 test images of 1 x 28 x 28 in [0, 1]."""
    folder = find_directory(name, directory)
    x_train, y_train, x_test, y_test = (
        parse_idx(content, f"{name}: {folder / file.path}")
        for content, file in zip(read_published(name, folder), FILES[name], strict=True)
    )
    return Dataset(
        name=name,
        x_train=_unit_pixels(x_train)[:, np.newaxis],
        y_train=y_train.astype(np.int64),
        x_test=_unit_pixels(x_test)[:, np.newaxis],
        y_test=y_test.astype(np.int64),
        classes=10,
    )


def read_fashion_mnist(directory: str | Path | None = None) -> Dataset:
    """60,000 training and 10,000 test images of 1 x 28 x 28 in [0, 1]."""
    return read_mnist(directory, "fashion-mnist")


def read_cifar10(directory: str | Path | None = None) -> Dataset:
    """50,000 training and 10,000 test images of 3 x 32 x 32 in [0, 1]."""
    folder = find_directory("cifar10", directory)
    path = folder / "cifar10" / "cifar10.npz"
    x_train, y_train, x_test, y_test = _from_npz(path) if path.is_file() else _decoded(folder)
    return Dataset(
        name="cifar10",
        x_train=_unit_pixels(x_train.transpose(0, 3, 1, 2)),
        y_train=y_train.astype(np.int64),
        x_test=_unit_pixels(x_test.transpose(0, 3, 1, 2)),
        y_test=y_test.astype(np.int64),
        classes=10,
    )


def write_cifar10_npz(folder: Path, target: Path) -> Path:
    """The path of cifar10/cifar10.npz, written below `target` from the compact copy in `folder`."""
    path = target / "cifar10" / "cifar10.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    x_train, y_train, x_test, y_test = _decoded(folder)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


def _from_npz(path: Path) -> list[NDArray[Any]]:
    """The four uint8 arrays of cifar10.npz, checked pixel by pixel and label by label."""
    arrays = parse_npz(read_bytes("cifar10", path), f"cifar10: {path}", _CIFAR10_ARRAYS)
    for name, array in zip(_CIFAR10_ARRAYS, arrays, strict=True):
        shape = (_SIDE, _SIDE, 3) if name.startswith("x") else ()
        if array.dtype != np.uint8 or array.shape[1:] != shape or array.ndim == 0:
            raise DataError(
                f"cifar10: {name} in {path} is {array.dtype} {array.shape}; "
                f"it must be uint8 (N, {', '.join(map(str, shape))})."
            )
    x_train, y_train, x_test, y_test = arrays
    folder = path.parents[1]
    labels_sum = FILES["cifar10"][1].sha256
    for what, train, test, expected in (
        ("the images", x_train, x_test, CIFAR10_PIXELS),
        ("the labels", y_train, y_test, labels_sum),
    ):
        content = np.concatenate([train, test]).tobytes()
        check_sum("cifar10", f"{path} ({what})", content, expected, folder)
    return arrays


def _decoded(folder: Path) -> list[NDArray[Any]]:
    """The four uint8 arrays of the compact copy."""
    packed, label_bytes = read_published("cifar10", folder)
    try:
        residuals = np.frombuffer(lzma.decompress(packed), np.uint8)
    except lzma.LZMAError as error:
        raise DataError(f"cifar10: the compact copy cannot be unpacked: {error}.") from error
    images = decode_images(residuals.reshape(3, -1, _SIDE, _SIDE))
    check_sum("cifar10", "the decoded compact copy", images.tobytes(), CIFAR10_PIXELS, folder)
    labels = np.frombuffer(label_bytes, np.uint8)
    count = _CIFAR10_TRAINING
    return [images[:count], labels[:count], images[count:], labels[count:]]


def decode_images(residuals: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Images N x H x W x 3 from zigzag-coded prediction errors, channel x N x H x W.

    Channels are green, red - green + 128 and blue - green + 128, modulo 256. A pixel is predicted
    by the median of left, up and left + up - corner; by its one neighbour on the edges.
    """
    # Pixel position first: each step then works on one contiguous plane over all images.
    codes = np.ascontiguousarray(residuals.transpose(2, 3, 0, 1))
    height, width = codes.shape[:2]
    # Zigzag: 0, 1, 2, 3, ... stand for 0, -1, 1, -2, ...; uint8 wraps around as wanted.
    errors = (codes >> 1) ^ (0 - (codes & 1))
    planes = np.empty_like(errors)
    for row in range(height):
        for column in range(width):
            if row and column:
                left = planes[row, column - 1].astype(np.int16)
                up = planes[row - 1, column].astype(np.int16)
                slope = left + up - planes[row - 1, column - 1]
                predicted = np.clip(slope, np.minimum(left, up), np.maximum(left, up))
                planes[row, column] = predicted.astype(np.uint8) + errors[row, column]
            elif column:
                planes[row, column] = planes[row, column - 1] + errors[row, column]
            elif row:
                planes[row, column] = planes[row - 1, column] + errors[row, column]
            else:
                planes[row, column] = np.uint8(128) + errors[row, column]
    green, red, blue = planes[:, :, 0], planes[:, :, 1], planes[:, :, 2]
    channels = [red - np.uint8(128) + green, green, blue - np.uint8(128) + green]
    return np.ascontiguousarray(np.stack(channels, axis=-1).transpose(2, 0, 1, 3))


def _unit_pixels(images: NDArray[Any]) -> NDArray[np.float32]:
    """Images as float32 in [0, 1].

    The mean of the data set is not subtracted: it is a statistic of the private records.
    """
    scaled = images.astype(np.float32, order="C")
    scaled /= np.float32(255)
    return scaled
