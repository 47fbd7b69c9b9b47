"""Inputs whose channels are alike and unrelated: by noisy statistics that are paid for."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.accounting.ledger.ledger import Ledger
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
class NoisyWhitening(NoisySums):
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

    def __call__(
        self,
        inputs: Tensor,
        ledger: Ledger,
        *,
        generator: torch.Generator | None = None,
        secure: bool = False,
    ) -> FrozenWhitening:
        """Whitening layer for inputs like these, charged before it is known.

        Args:
            inputs: of shape (records, channels, places...).
            ledger: ledger to charge, twice.
            generator: seeds the noise, so that it can be repeated: for tests.
            secure: draw noise from the operating system.

        Returns:
            A layer that may be published with the guarantee.
        """
        mean, products = self._means(inputs, related, ledger, generator, secure)
        channels, places = inputs.shape[1], inputs[0, 0].numel()
        centre = mean.view(channels, places)
        covariance = (products + products.T) / 2 - centre @ centre.T / places
        variances, directions = torch.linalg.eigh(covariance)
        # the largest eigenvalue of a symmetric matrix of such noise, as it grows
        noise = math.sqrt(2 * channels) * self.multiplier * self.square_norm / len(inputs)
        matrix = directions * variances.clamp(min=noise).rsqrt() @ directions.T
        return FrozenWhitening(mean.view(inputs.shape[1:]), matrix)


def related(values: Tensor) -> Pair:
    """Features of each record, and the mean over its places of its channels' outer products."""
    channels, places = values.shape[1:]
    products = outer_product_term(values.mT, values.mT / places, torch.Size([channels, channels]))
    return Dense(values.flatten(1)), products
