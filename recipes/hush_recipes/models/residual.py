"""Residual networks without batch statistics: the twice-sampling paper's, and a wide one.

GroupNorm in place of BatchNorm: no record affects another's gradient. ELU in place of ReLU, whose
derivative jumps: Fisher information of a record needs a gradient that is continuous in the record.
"""

import torch
from torch import Tensor, nn

_RESNET_GROUPS = 4
_WIDTHS = (16, 32, 64)
_BLOCKS = 3
_STEM, _WIDE_GROUPS = 16, 8


class ResNet22(nn.Module):
    """The network of the twice-sampling paper, Section 3.2: 291,898 parameters for ten classes.

    22 weighted layers. The paper gives the number of parameters and not the layout. This is one with
    that number: three stages of three blocks, normalised before each convolution, a bias wherever the
    output is not normalised next, 3 x 3 convolutions where the width changes, and a learned scale of the
    last features.
    """

    def __init__(self, classes: int, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, _WIDTHS[0], kernel_size=3, padding=1)
        widths_before = [_WIDTHS[0], *_WIDTHS[:-1]]
        self.blocks = nn.Sequential(
            *(
                ResNetBlock(before if block == 0 else width, width)
                for before, width in zip(widths_before, _WIDTHS, strict=True)
                for block in range(_BLOCKS)
            )
        )
        self.scale = nn.Parameter(torch.ones(_WIDTHS[-1]))
        self.scores = nn.Linear(_WIDTHS[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.elu(_normalised(self.blocks(self.stem(images)))).mean((2, 3))
        scores: Tensor = self.scores(features * self.scale)
        return scores


class ResNetBlock(nn.Module):
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
    """GroupNorm without learned parameters: statistics of one record alone."""
    return nn.functional.group_norm(x, _RESNET_GROUPS)


def resnet22(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """The network for 3 x 32 x 32 images."""
    return ResNet22(classes, shape[0])


class WideResNet(nn.Module):
    """Wide residual network (Zagoruyko and Komodakis 2016): three stages of blocks,
    16, 32 and 64 times `width` channels wide; 6 `blocks` + 4 layers deep.
    """

    def __init__(self, classes: int, channels: int, *, blocks: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, _STEM, kernel_size=3, padding=1, bias=False)
        stages: list[nn.Module] = []
        before = _STEM
        for stage in range(3):
            after = _STEM * width * 2**stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(WideBlock(before, after, stride))
                before = after
        self.stages = nn.Sequential(*stages)
        self.last = nn.GroupNorm(_WIDE_GROUPS, before)
        self.scores = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.elu(self.last(self.stages(self.stem(images))))
        scores: Tensor = self.scores(features.mean((2, 3)))
        return scores


class WideBlock(nn.Module):
    """Two 3 x 3 convolutions, each normalised before it, beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(_WIDE_GROUPS, before)
        self.first = nn.Conv2d(before, after, kernel_size=3, stride=stride, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(_WIDE_GROUPS, after)
        self.second = nn.Conv2d(after, after, kernel_size=3, padding=1, bias=False)
        self.shortcut = (
            nn.Identity()
            if before == after and stride == 1
            else nn.Conv2d(before, after, kernel_size=1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        activated = nn.functional.elu(self.first_norm(x))
        inner = self.second(nn.functional.elu(self.second_norm(self.first(activated))))
        # as its authors have it, a shortcut that changes the width takes the normalised input
        shortcut = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(activated)
        total: Tensor = inner + shortcut
        return total


def wrn_10_2(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """10 layers, twice as wide as a usual residual network: 303,706 parameters for ten classes."""
    return WideResNet(classes, shape[0], blocks=1, width=2)
