"""The small set of handwritten digits that comes with scikit-learn: needs no files."""

import numpy as np

from hush.data.dataset import Dataset, public_order, unit_pixels

_TRAINING = 1437


def read_digits() -> Dataset:
    """1,437 training and 360 test images of 1 x 8 x 8 in [0, 1]; the split is fixed and public."""
    from sklearn.datasets import load_digits

    bundled = load_digits()
    order = public_order(len(bundled.target))
    # Pixels count the dark points of a 4 x 4 patch, so 16 is the most there can be.
    images = unit_pixels(bundled.images[order], brightest=16)[:, np.newaxis]
    labels = bundled.target[order].astype(np.int64)
    return Dataset(
        name="digits",
        x_train=images[:_TRAINING],
        y_train=labels[:_TRAINING],
        x_test=images[_TRAINING:],
        y_test=labels[_TRAINING:],
        classes=10,
    )
