"""Inputs whose channels are alike and unrelated: by noisy statistics that are paid for."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hush.accounting.ledger.ledger import Ledger
from hush.gradients.factors import product
from hush.gradients.terms import Dense
from hush.training.methods.moments import NoisySums, Pair


class FrozenWhitening(nn.Module):
    """The features less a mean, their channels mixed by a matrix; nothing is learned.

    The numbers must be public, or private ones that were paid for (`NoisyWhitening`).
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
    """The mean of every feature, and the second moments of the channels among each other.

    What a record adds to the first sum is all its features, to the second the mean over its places of
    the products of its channels, scaled down to a Euclidean norm of `norm` and `square_norm` at most.

    **Guarantee.** That of `NoisySums`: all else is made of the two noisy sums.

    Directions whose variance is below what noise alone would show are scaled as if they had that much,
    so that little is made of them. A gradient's norm is then no longer spent on the few directions in
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
        """What whitens `inputs` (records, channels, places...)."""
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
    """The features of each record, and the mean over its places of its channels' products."""
    channels, places = values.shape[1:]
    products = product(values.mT, values.mT / places, torch.Size([channels, channels]))
    return Dense(values.flatten(1)), products
