"""Readers for the standard file formats, and a small data set that is always there."""

from hush.core.lazy import lazy_modules
from hush.data.dataset import Dataset
from hush.data.registry import NAMES, load
from hush.data.tensors import tensors

__all__ = ["NAMES", "Dataset", "load", "tensors"]

__getattr__ = lazy_modules(__name__)
