"""Noise laws and their samplers, one file a family. `__all__` is the list of the laws."""

from hush.noise.bounded import Quantized, Rectified, StochasticSign, Truncated
from hush.noise.gaussian import BlockGaussian, Gaussian, GeneralizedGaussian, Laplace
from hush.noise.sample import sample as sample

__all__ = [
    "BlockGaussian",
    "Gaussian",
    "GeneralizedGaussian",
    "Laplace",
    "Quantized",
    "Rectified",
    "StochasticSign",
    "Truncated",
]
