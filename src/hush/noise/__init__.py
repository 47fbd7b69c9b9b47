"""1-D laws and samplers, one file a family."""

from hush.noise.gaussian import Gaussian
from hush.noise.sample import sample

__all__ = ["Gaussian", "sample"]
