"""The votes of 250 teachers on MNIST and SVHN (Papernot et al. 2017)."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.data.published import find_directory, read_published

TEACHERS = 250


def read_votes(directory: str | Path | None = None) -> tuple[NDArray[Any], NDArray[Any]]:
    """Counts of votes for ten classes on 9,000 MNIST and 26,032 SVHN test images, a row an image.

    The MNIST rows are the first 9,000 test images in order. The files are read without pickle.
    """
    folder = find_directory("pate-votes", directory)
    mnist, svhn = (
        np.load(io.BytesIO(content), allow_pickle=False)
        for content in read_published("pate-votes", folder)
    )
    return mnist, svhn
