"""Noise laws and their samplers, one file a family. `__all__` is the list of the laws."""

from hush.noise.gaussian import BlockGaussian, Gaussian, GeneralizedGaussian, Laplace
from hush.noise.post_processed import Quantized, Rectified, StochasticSign
from hush.noise.sample import sample as sample
from hush.noise.truncated import Truncated

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
