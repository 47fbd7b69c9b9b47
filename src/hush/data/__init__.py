"""Data sets by name, features of images, augmented views; readers check files against published sums."""

from hush.core import lazy_modules
from hush.data.dataset import Dataset, tensors
from hush.data.features import with_features
from hush.data.owners import read_owners
from hush.data.registry import NAMES, load
from hush.data.views import flips_and_shifts

__all__ = ["NAMES", "Dataset", "flips_and_shifts", "load", "read_owners", "tensors", "with_features"]

__getattr__ = lazy_modules(__name__)
