"""Pixels as numbers between 0 and 1."""

from typing import Any

import numpy as np
from numpy.typing import NDArray


def unit_pixels(images: NDArray[Any], brightest: int = 255) -> NDArray[np.float32]:
    """The images as float32 in [0, 1]: divided by the largest value a pixel can have.

    The usual subtraction of the data set's mean is left out: that mean is a statistic of the
    private records.
    """
    scaled = images.astype(np.float32, order="C")
    scaled /= np.float32(brightest)
    return scaled
