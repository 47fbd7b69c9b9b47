"""Normalisation by numbers that are known before training."""

import torch
from torch import Tensor, nn


class FrozenNorm(nn.Module):
    """Each channel less a mean, over a deviation; nothing is learned, and no record sees another.

    The numbers must be public, or private ones that were paid for (`NoisyMoments`).
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.to(torch.float32))
        self.register_buffer("scale", variance.to(torch.float32).rsqrt())

    def forward(self, inputs: Tensor) -> Tensor:
        places = (len(self.mean), *[1] * (inputs.ndim - 2))
        return (inputs - self.mean.view(places)) * self.scale.view(places)
