"""Networks and records of the seeded runs."""

import torch
from torch import Tensor, nn

from hush.data import load, tensors

Data = tuple[Tensor, Tensor]
_RECORDS, CLASSES, _PIXELS, _WORDS = 64, 10, 64, 20


class _Sequence(nn.Module):
    """Scores from the mean over words of what a layer makes of their embeddings."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embedding, self.layer, self.scores = nn.Embedding(_WORDS, 8), layer, nn.Linear(8, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        words = self.embedding(tokens)
        hidden = self.layer(words)
        scores: Tensor = self.scores((hidden[0] if isinstance(hidden, tuple) else hidden).mean(1))
        return scores


def linear() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(_PIXELS, CLASSES))


def wide() -> nn.Module:
    """A layer large enough that noise is drawn while gradients are computed."""
    return nn.Sequential(nn.Flatten(), nn.Linear(_PIXELS, 2048))


def mlp() -> nn.Module:
    layers = nn.Linear(_PIXELS, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, CLASSES)
    return nn.Sequential(nn.Flatten(), *layers)


def cnn() -> nn.Module:
    layers = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, CLASSES))


def lstm() -> nn.Module:
    return _Sequence(nn.LSTM(8, 8, batch_first=True))


def transformer() -> nn.Module:
    return _Sequence(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True))


def digits() -> Data:
    inputs, targets, _, _ = tensors(load("digits"))
    return inputs[:_RECORDS], targets[:_RECORDS]


def public() -> Data:
    inputs, targets, _, _ = tensors(load("digits"))
    return inputs[_RECORDS : 2 * _RECORDS], targets[_RECORDS : 2 * _RECORDS]


def tokens() -> Data:
    drawn = seeded(1)
    tokens = torch.randint(0, _WORDS, (_RECORDS, 5), generator=drawn)
    return tokens, torch.randint(0, 2, (_RECORDS,), generator=drawn)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
