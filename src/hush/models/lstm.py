"""The recurrent networks for reviews of 001 (Table 7) and 004 (Figure 4)."""

import torch
from torch import Tensor, nn

from hush.data.imdb import PADDING, VOCABULARY

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
    """The network of Table 7 for 10,000 token ids: 1,021,202 parameters for two classes."""
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
    """The network of 004 for 10,000 token ids: 1,081,002 parameters for two classes."""
    return PlainLstm(classes)


def _mean_over_words(outputs: Tensor, tokens: Tensor) -> Tensor:
    is_word = (tokens != PADDING).unsqueeze(-1).to(outputs.dtype)
    return (outputs * is_word).sum(dim=1) / is_word.sum(dim=1).clamp(min=1)
