"""1-D laws and samplers, one file a family."""

from hush.noise.block_gaussian import BlockGaussian
from hush.noise.gaussian import Gaussian
from hush.noise.generalized_gaussian import GeneralizedGaussian
from hush.noise.laplace import Laplace
from hush.noise.sample import sample

__all__ = ["BlockGaussian", "Gaussian", "GeneralizedGaussian", "Laplace", "sample"]
