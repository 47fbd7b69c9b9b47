"""The convolutional networks on raw pixels of 001 (Tables 5 and 6), with tanh.

Tanh bounds what a layer passes on, which keeps the gradients of single records, and so what
clipping cuts off, small.
"""

from torch import nn


def mnist_cnn(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """The network of Table 5 for 1 x 28 x 28 images: 26,010 parameters for ten classes."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, kernel_size=8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2, stride=1),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def cifar_cnn(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """The network of Table 6 for 3 x 32 x 32 images: 550,570 parameters for ten classes."""
    return nn.Sequential(
        *_block(shape[0], 32),
        *_block(32, 64),
        *_block(64, 128),
        nn.Flatten(),
        nn.Linear(128 * 4 * 4, 128),
        nn.Tanh(),
        nn.Linear(128, classes),
    )


def _block(channels: int, filters: int) -> list[nn.Module]:
    return [
        nn.Conv2d(channels, filters, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Conv2d(filters, filters, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(kernel_size=2),
    ]
