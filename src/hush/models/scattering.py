"""The networks on scattering features of 001 and 004 (first in Tramèr and Boneh 2021), with tanh.

Features are normalised record by record, in groups of channels, by nothing that is learned: batch
normalisation would mix records, and its statistics would have to be paid for.
"""

import math

from torch import nn

_GROUPS = 27


def scattering_mnist(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """For 81 x 7 x 7 features of 28 x 28 images: 33,066 parameters for ten classes."""
    return nn.Sequential(
        _normalised(shape),
        nn.Conv2d(shape[0], 16, kernel_size=3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def scattering_cifar(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """For 243 x 8 x 8 features of 3 x 32 x 32 images: 187,210 parameters for ten classes."""
    return nn.Sequential(
        _normalised(shape),
        nn.Conv2d(shape[0], 64, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2),
        nn.Conv2d(64, 64, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, classes),
    )


def scattering_linear(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """One linear layer, zero to begin with, as the loss is convex."""
    linear = nn.Linear(math.prod(shape), classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(_normalised(shape), nn.Flatten(), linear)


def _normalised(shape: tuple[int, ...]) -> nn.Module:
    return nn.GroupNorm(_GROUPS, shape[0], affine=False)
