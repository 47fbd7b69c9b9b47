"""A small wide residual network (Zagoruyko and Komodakis 2016) without batch statistics.

ELU in place of ReLU: its derivative has no jumps, so that neither has a record's gradient as a function
of the record, and Fisher information of what is released about it is defined. GroupNorm in place of
BatchNorm: a record is scored alone.
"""

from torch import Tensor, nn

_STEM, _GROUPS = 16, 8


class WideResNet(nn.Module):
    """Three stages of blocks, 16, 32 and 64 times `width` channels wide; 6 `blocks` + 4 layers deep."""

    def __init__(self, classes: int, channels: int, *, blocks: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, _STEM, kernel_size=3, padding=1, bias=False)
        stages: list[nn.Module] = []
        before = _STEM
        for stage in range(3):
            now = _STEM * width * 2**stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                stages.append(Block(before, now, stride))
                before = now
        self.stages = nn.Sequential(*stages)
        self.last = nn.GroupNorm(_GROUPS, before)
        self.scores = nn.Linear(before, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.elu(self.last(self.stages(self.stem(images))))
        scores: Tensor = self.scores(features.mean((2, 3)))
        return scores


class Block(nn.Module):
    """Two 3 x 3 convolutions, each normalised before it, beside a shortcut."""

    def __init__(self, before: int, now: int, stride: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(_GROUPS, before)
        self.first = nn.Conv2d(before, now, kernel_size=3, stride=stride, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(_GROUPS, now)
        self.second = nn.Conv2d(now, now, kernel_size=3, padding=1, bias=False)
        self.shortcut = (
            nn.Identity()
            if before == now and stride == 1
            else nn.Conv2d(before, now, kernel_size=1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        seen = nn.functional.elu(self.first_norm(x))
        inner = self.second(nn.functional.elu(self.second_norm(self.first(seen))))
        # as its authors have it, the shortcut that changes the width sees the normalised image
        beside = x if isinstance(self.shortcut, nn.Identity) else self.shortcut(seen)
        total: Tensor = inner + beside
        return total


def wrn_10_2(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """10 layers, twice as wide as a usual residual network: 303,706 parameters for ten classes."""
    return WideResNet(classes, shape[0], blocks=1, width=2)
