"""MNIST and Fashion-MNIST: four idx files each, of the same shapes."""

from pathlib import Path

import numpy as np

from hush.data.dataset import Dataset
from hush.data.files import read_published
from hush.data.idx import parse_idx
from hush.data.pixels import unit_pixels
from hush.data.published import FILES


def read_mnist(name: str, folder: Path) -> Dataset:
    """The data set `name` (mnist or fashion-mnist): images N x 1 x 28 x 28 in [0, 1]."""
    x_train, y_train, x_test, y_test = (
        parse_idx(content, f"{name}: {folder / file.path}")
        for content, file in zip(read_published(name, folder), FILES[name], strict=True)
    )
    return Dataset(
        name=name,
        x_train=unit_pixels(x_train)[:, np.newaxis],
        y_train=y_train.astype(np.int64),
        x_test=unit_pixels(x_test)[:, np.newaxis],
        y_test=y_test.astype(np.int64),
        classes=10,
    )
