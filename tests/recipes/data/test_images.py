"""CIFAR-10 from its two layouts."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hush.data import load
from hush_recipes.data import images as module
from hush_recipes.data.images import decode_images
from hush_recipes.data.published import FILES, Published

RNG = np.random.default_rng(7)
X_TRAIN, X_TEST = (RNG.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8) for count in (4, 2))
Y_TRAIN, Y_TEST = np.array([0, 9, 3, 1], np.uint8), np.array([2, 5], np.uint8)


def encode(images: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The compact copy's residuals, one pixel at a time: an oracle for the decoder."""
    pixels = images.astype(int)
    red, green, blue = pixels[..., 0], pixels[..., 1], pixels[..., 2]
    planes = np.stack([green, (red - green + 128) % 256, (blue - green + 128) % 256])
    codes = np.empty(planes.shape, np.uint8)
    for channel, image, row, column in np.ndindex(*planes.shape):
        plane = planes[channel, image]
        if row and column:
            left, up = plane[row, column - 1], plane[row - 1, column]
            guess = sorted([left, up, left + up - plane[row - 1, column - 1]])[1]
        else:
            guess = plane[row, column - 1] if column else plane[row - 1, column] if row else 128
        error = (plane[row, column] - guess + 128) % 256 - 128
        codes[channel, image, row, column] = 2 * error if error >= 0 else -2 * error - 1
    return codes


@pytest.mark.parametrize("shape", [(3, 5, 4, 3), (1, 1, 1, 3), (2, 3, 6, 3)])
def test_decoding_undoes_encoding(shape: tuple[int, ...]) -> None:
    noise = RNG.integers(0, 256, shape, dtype=np.uint8)
    smooth = np.sort(noise, axis=1)
    for images in (noise, smooth, np.zeros_like(noise), np.full_like(noise, 255)):
        assert np.array_equal(decode_images(encode(images)), images)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A data directory with a cifar10.npz of six images."""
    write(tmp_path)
    pixels = np.concatenate([X_TRAIN, X_TEST]).tobytes()
    labels = np.concatenate([Y_TRAIN, Y_TEST]).tobytes()
    monkeypatch.setattr(module, "CIFAR10_PIXELS", hashlib.sha256(pixels).hexdigest())
    files = (
        Published("cifar10/images.med.xz", "-"),
        Published("cifar10/labels.u8", hashlib.sha256(labels).hexdigest()),
    )
    monkeypatch.setitem(FILES, "cifar10", files)
    return tmp_path


def write(folder: Path, **changes: Any) -> None:
    arrays = {"x_train": X_TRAIN, "y_train": Y_TRAIN, "x_test": X_TEST, "y_test": Y_TEST}
    (folder / "cifar10").mkdir(exist_ok=True)
    np.savez(folder / "cifar10" / "cifar10.npz", **{**arrays, **changes})


def test_channels_come_first(folder: Path) -> None:
    dataset = load("cifar10", folder)
    assert dataset.x_train.shape == (4, 3, 32, 32)
    assert dataset.x_train.flags.c_contiguous
    assert np.array_equal(np.rint(dataset.x_test[1, 2] * 255), X_TEST[1, :, :, 2])
    assert dataset.y_train.tolist() == [0, 9, 3, 1]
