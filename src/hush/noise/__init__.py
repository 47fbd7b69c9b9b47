"""1-D laws and samplers, one file a family."""

from hush.noise.block_gaussian import BlockGaussian
from hush.noise.gaussian import Gaussian
from hush.noise.generalized_gaussian import GeneralizedGaussian
from hush.noise.laplace import Laplace
from hush.noise.quantized import Quantized
from hush.noise.rectified import Rectified
from hush.noise.sample import sample
from hush.noise.stochastic_sign import StochasticSign
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
