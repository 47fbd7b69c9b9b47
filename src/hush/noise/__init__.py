"""1-D laws and samplers, one file a family."""

from hush.noise.gaussian import BlockGaussian, Gaussian
from hush.noise.generalized_gaussian import GeneralizedGaussian, Laplace
from hush.noise.post_processed import Quantized, Rectified, StochasticSign
from hush.noise.sample import sample
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
    "sample",
]
