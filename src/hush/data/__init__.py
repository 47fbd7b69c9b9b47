"""Data sets by name, features of images, owners of records, augmented views."""

from hush.core import lazy_modules
from hush.data.dataset import (
    Dataset,
    flips_and_shifts,
    load,
    names,
    read_owners,
    tensors,
    with_features,
)

__all__ = [
    "Dataset",
    "flips_and_shifts",
    "load",
    "names",
    "read_owners",
    "tensors",
    "with_features",
]

__getattr__ = lazy_modules(__name__)
