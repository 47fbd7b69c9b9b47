"""Networks of the step benchmark, with the changes that Opacus needs, and their inputs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from hush.models import build
from hush_recipes.models.networks import ImdbLstm


class Block(nn.Module):
    """Two convolutions and a residual connection."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(4, filters) for _ in range(2))
        self.shortcut = (
            nn.Identity() if stride == 1 else nn.Conv2d(channels, filters, 1, stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


def resnet20() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.GroupNorm(4, 16), nn.ReLU()]
    channels = 16
    for filters in (16, 32, 64):
        for _ in range(3):
            layers.append(Block(channels, filters, 1 if channels == filters else 2))
            channels = filters
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


class Transformer(nn.Module):
    """A classifier of token sequences; `peer` makes the changes that Opacus needs."""

    def __init__(self, peer: bool) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(5000, 128), nn.Embedding(128, 128)
        layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        if peer:
            from opacus.layers import DPMultiheadAttention

            layer.self_attn = DPMultiheadAttention(128, 4, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.scores = nn.Linear(128, 10)
        self.peer = peer

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        if self.peer:
            positions = positions.expand_as(tokens).contiguous()
        x = self.layers(self.words(tokens) + self.places(positions))
        scores: Tensor = self.scores(x.mean(1))
        return scores


def bilstm(peer: bool) -> nn.Module:
    model = ImdbLstm(10)
    if peer:
        from opacus.layers import DPLSTM

        model.lstm = DPLSTM(32, 32, batch_first=True, bidirectional=True)
    return model


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )


def images(*shape: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, *shape)


def tokens(vocabulary: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, vocabulary, (batch, 128))


MODELS: dict[str, tuple[Callable[[bool], nn.Module], Callable[[int], Tensor]]] = {
    "mnist": (lambda _: build("mnist-cnn", classes=10, shape=(1, 28, 28)), images(1, 28, 28)),
    "cifar": (lambda _: build("cifar-cnn", classes=10, shape=(3, 32, 32)), images(3, 32, 32)),
    "resnet20": (lambda _: resnet20(), images(3, 32, 32)),
    "mlp": (lambda _: mlp(), images(784)),
    "linear": (lambda _: nn.Linear(8, 10), images(8)),
    "small-mlp": (
        lambda _: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)),
        images(64),
    ),
    "deep": (lambda _: nn.Sequential(*(nn.Linear(32, 32) for _ in range(12))), images(32)),
    "transformer": (Transformer, tokens(5000)),
    "bilstm": (bilstm, tokens(10_000)),
}
