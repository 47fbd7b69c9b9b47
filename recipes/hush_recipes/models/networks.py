"""Networks of the DPSUR and generalized Gaussian papers: convolutional, linear, recurrent, on features.

Tanh bounds activations, which keeps per-sample gradients, and so what clipping cuts off, small.
"""

import torch
from torch import Tensor, nn

from hush.models import logistic
from hush_recipes.data.imdb import PADDING, VOCABULARY


def mnist_cnn(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """The network of DPSUR's Table 5 for 1 x 28 x 28 images: 26,010 parameters for ten classes."""
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
    """The network of DPSUR's Table 6 for 3 x 32 x 32 images: 550,570 parameters for ten classes."""
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


_EMBEDDING, _UNITS, _HIDDEN = 100, 32, 16


class ImdbLstm(nn.Module):
    """Scores of a review from the mean of a bidirectional LSTM's outputs over its words.

    The paper does not say how the outputs over time become one vector. The mean over words is used:
    the last state of a padded review mostly tells how much padding there was.
    """

    def __init__(self, classes: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        # No padding_idx: it would keep the padding row at zero, but noise moves every row alike.
        self.embedding = nn.Embedding(vocabulary, _EMBEDDING)
        self.projection = nn.Linear(_EMBEDDING, _UNITS)
        self.lstm = nn.LSTM(_UNITS, _UNITS, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(2 * _UNITS, _HIDDEN)
        self.scores = nn.Linear(_HIDDEN, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        words = torch.tanh(self.projection(self.embedding(tokens)))
        outputs, _ = self.lstm(words)
        mean = _mean_over_words(outputs, tokens)
        scores: Tensor = self.scores(torch.tanh(self.hidden(mean)))
        return scores


def imdb_lstm(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """The network of DPSUR's Table 7 for 10,000 token ids: 1,021,202 parameters for two classes."""
    return ImdbLstm(classes)


class PlainLstm(nn.Module):
    """Scores of a review from the mean of an LSTM's outputs over its words, embedded 100 wide."""

    def __init__(self, classes: int, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, _EMBEDDING)
        self.lstm = nn.LSTM(_EMBEDDING, _EMBEDDING, batch_first=True)
        self.scores = nn.Linear(_EMBEDDING, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens))
        scores: Tensor = self.scores(_mean_over_words(outputs, tokens))
        return scores


def imdb_plain_lstm(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """The generalized Gaussian paper's for 10,000 token ids: 1,081,002 parameters, two classes."""
    return PlainLstm(classes)


def _mean_over_words(outputs: Tensor, tokens: Tensor) -> Tensor:
    is_word = (tokens != PADDING).unsqueeze(-1).to(outputs.dtype)
    return (outputs * is_word).sum(dim=1) / is_word.sum(dim=1).clamp(min=1)


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
    """One linear layer on normalised features, initialised to zero, as the loss is convex."""
    return nn.Sequential(_normalised(shape), *logistic(classes, shape).children())


def _normalised(shape: tuple[int, ...]) -> nn.Module:
    return nn.GroupNorm(_GROUPS, shape[0], affine=False)
