"""Normalisation by numbers that are known before training."""

import torch
from torch import Tensor, nn


class FrozenNorm(nn.Module):
    """Each channel less a mean, over a deviation; nothing is learned, and no record sees another.

    Both are of the shape of a record, or of its first dimensions.

    The numbers must be public, or private ones that were paid for (`NoisyMoments`).
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.to(torch.float32))
        self.register_buffer("scale", variance.to(torch.float32).rsqrt())

    def forward(self, inputs: Tensor) -> Tensor:
        places = (*self.mean.shape, *[1] * (inputs.ndim - 1 - self.mean.ndim))
        return (inputs - self.mean.view(places)) * self.scale.view(places)
