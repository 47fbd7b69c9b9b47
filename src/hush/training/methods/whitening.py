"""Whitening of the inputs by a differentially private mean and covariance."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.gradients.rules.linear import outer_product_term
from hush.gradients.terms import Dense
from hush.training.methods.moments import NoisySums, Pair


class FrozenWhitening(nn.Module):
    """Affine whitening layer: the features less a mean, their channels times a matrix; not trained.

    Mean and matrix must be public, or private ones that were paid for (`NoisyWhitening`).
    """

    mean: Tensor
    matrix: Tensor

    def __init__(self, mean: Tensor, matrix: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.to(torch.float32))
        self.register_buffer("matrix", matrix.to(torch.float32))

    def forward(self, inputs: Tensor) -> Tensor:
        centred = (inputs - self.mean).reshape(*inputs.shape[:2], -1)
        return (self.matrix.to(centred.dtype) @ centred).view(inputs.shape)


@dataclass(frozen=True, kw_only=True)
class NoisyWhitening(NoisySums[FrozenWhitening]):
    """Whitening with a differentially private mean and covariance.

    A record adds all its features to the first sum, and to the second the mean over its places of the
    outer products of its channels, clipped to l2 norms of `norm` and `square_norm`.

    Args:
        multiplier: Noise of both sums, in units of their clipping norms.
        norm: Clipping norm of a record's features.
        square_norm: Clipping norm of a record's mean outer product.

    **Guarantee.** As of `NoisySums`: the layer is post-processing of the two noisy sums.

    Eigenvalues of the covariance below what noise alone would show are raised to that, so that little is
    made of their directions. A gradient's norm is then no longer spent on the few directions in
    which all records are alike, and the same noise hides less.
    """

    def vectors(self, values: Tensor) -> Pair:
        """Features of each record, and the mean over its places of its channels' outer products.

        Args:
            values: of shape (records, channels, places), finite.
        """
        channels, places = values.shape[1:]
        products = outer_product_term(values.mT, values.mT / places, torch.Size([channels, channels]))
        return Dense(values.flatten(1)), products

    def statistics(self, means: list[Tensor], shape: torch.Size) -> FrozenWhitening:
        """Whitening layer for inputs of a shape.

        Args:
            means: noisy means of the records' features, and of their channels' outer products.
            shape: of the inputs.
        """
        mean, products = means
        records, channels, places = shape[0], shape[1], shape[2:].numel()
        centre = mean.view(channels, places)
        covariance = (products + products.T) / 2 - centre @ centre.T / places
        variances, directions = torch.linalg.eigh(covariance)
        # the largest eigenvalue of a symmetric matrix of such noise, as it grows
        noise = math.sqrt(2 * channels) * self.multiplier * self.square_norm / records
        matrix = directions * variances.clamp(min=noise).rsqrt() @ directions.T
        return FrozenWhitening(mean.view(shape[1:]), matrix)
