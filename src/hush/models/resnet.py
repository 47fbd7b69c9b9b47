"""The residual network of the twice-sampling paper (Section 3.2): 22 weighted layers, ELU, GroupNorm.

The paper gives the number of its parameters and not its layout. This is one with that number: three
stages of three blocks, normalised before each convolution, a bias wherever the output is not normalised
next, 3 x 3 convolutions where the width changes, and a learned scale of the last features.
"""

import torch
from torch import Tensor, nn

_GROUPS = 4
_WIDTHS = (16, 32, 64)
_BLOCKS = 3


class ResNet22(nn.Module):
    """For colour images: 291,898 parameters for ten classes."""

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, _WIDTHS[0], kernel_size=3, padding=1)
        inside = [_WIDTHS[0], *_WIDTHS[:-1]]
        self.blocks = nn.Sequential(
            *(
                Block(before if block == 0 else width, width)
                for before, width in zip(inside, _WIDTHS, strict=True)
                for block in range(_BLOCKS)
            )
        )
        self.scale = nn.Parameter(torch.ones(_WIDTHS[-1]))
        self.scores = nn.Linear(_WIDTHS[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.elu(_normalised(self.blocks(self.stem(images)))).mean((2, 3))
        scores: Tensor = self.scores(features * self.scale)
        return scores


class Block(nn.Module):
    """Two convolutions beside a shortcut; where the width grows, the image shrinks by two."""

    def __init__(self, before: int, width: int) -> None:
        super().__init__()
        stride = 1 if before == width else 2
        self.first = nn.Conv2d(before, width, kernel_size=3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, kernel_size=3, padding=1)
        self.shortcut = (
            nn.Identity()
            if before == width
            else nn.Conv2d(before, width, kernel_size=3, stride=stride, padding=1)
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(nn.functional.elu(_normalised(x)))
        inner = self.second(nn.functional.elu(_normalised(inner)))
        total: Tensor = inner + self.shortcut(x)
        return total


def _normalised(x: Tensor) -> Tensor:
    """In groups of channels, within a record."""
    return nn.functional.group_norm(x, _GROUPS)


def resnet22(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """The network for 3 x 32 x 32 images."""
    return ResNet22(classes, shape[0])
