"""Bag of words: which common words, and which pairs of very common ones, a text has; and a linear model.

Words are ranks in a public list, 1 the most frequent. The features of a text are a function of that text
and of public numbers: weights of words follow from their ranks, a stand-in for how rare they are that is
as public as the list is.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from hush_recipes.data.imdb import PADDING

_TEXTS = 4096
"""Texts whose features are computed at once."""


@dataclass(frozen=True, kw_only=True)
class BagOfWords:
    """Presence of words and of ordered pairs of neighbouring words, as sparse vectors of norm 1."""

    words: int = 5000
    """Ranks up to this one count as words."""
    pairs: int = 300
    """Ranks up to this one, side by side, count as pairs; each pair is a feature of its own."""
    share: float = 0.2
    """Of the squared norm that pairs have; the rest is the words'."""
    exponent: float = 0.5
    """A word weighs (rank + 10) ** exponent: 1/2 is about the inverse of its standard deviation."""
    last: int = 20
    """Words at the end of a text, where the verdict comes,"""
    emphasis: float = 0.5
    """that weigh 1 + this."""
    most_words: int = 288
    """Different words of a text that count; beyond, the rarest are left out."""
    most_pairs: int = 224
    """Different pairs of a text that count; beyond, those that begin with the rarest words are not."""

    @property
    def size(self) -> int:
        """Number of features."""
        return self.words + self.pairs**2

    def __call__(self, texts: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Indices of each text's features, and their values; unused places have index 0 and value 0.

        Args:
            texts: ranks of words, padded at the end, a row a text.
        """
        rows = [self._features(texts[begin : begin + _TEXTS]) for begin in range(0, len(texts), _TEXTS)]
        index, value = (np.concatenate(part) for part in zip(*rows, strict=True))
        return torch.from_numpy(index), torch.from_numpy(value)

    def _features(self, texts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        length = (texts != PADDING).sum(axis=1, keepdims=True)
        early = np.arange(texts.shape[1]) < length - self.last
        # of a word's occurrences a late one sorts first
        occurrences = np.where(_up_to(texts, self.words), 2 * texts + early, -1)
        word, is_early = np.divmod(_distinct(occurrences, self.most_words, divisor=2), 2)
        weight = (word + 10.0) ** self.exponent * np.where(is_early, 1.0, 1 + self.emphasis)
        left, right = texts[:, :-1], texts[:, 1:]
        both = _up_to(left, self.pairs) & _up_to(right, self.pairs)
        pair = _distinct(np.where(both, (left - 1) * self.pairs + right - 1, -1), self.most_pairs)
        index = np.concatenate([word - 1, np.where(pair < 0, -1, self.words + pair)], axis=1)
        value = np.concatenate(
            [
                _of_norm(math.sqrt(1 - self.share), np.where(word < 0, 0.0, weight)),
                _of_norm(math.sqrt(self.share), np.where(pair < 0, 0.0, 1.0)),
            ],
            axis=1,
        )
        return np.maximum(index, 0), value.astype(np.float32)


def _up_to(texts: NDArray[np.int64], rank: int) -> NDArray[np.bool_]:
    """Where there is a word of at most this rank."""
    common: NDArray[np.bool_] = (texts != PADDING) & (texts <= rank)
    return common


def _distinct(codes: NDArray[np.int64], most: int, *, divisor: int = 1) -> NDArray[np.int64]:
    """The least codes of each row that differ after division, at most `most`; -1: no more of them."""
    end = np.iinfo(np.int64).max
    ordered = np.sort(np.where(codes < 0, end, codes), axis=1)
    before = np.pad(ordered[:, :-1], ((0, 0), (1, 0)), constant_values=-divisor)
    differs = ordered // divisor != before // divisor
    place = np.cumsum(differs, axis=1) - 1
    new = differs & (ordered < end) & (place < most)
    distinct = np.full((len(codes), most), -1, dtype=np.int64)
    distinct[np.nonzero(new)[0], place[new]] = ordered[new]
    return distinct


def _of_norm(norm: float, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Each row scaled to the norm, where it is not zero."""
    norms = np.linalg.norm(values, axis=1, keepdims=True)
    scaled: NDArray[np.float64] = norm * values / np.where(norms == 0, 1.0, norms)
    return scaled


class SparseLogistic(nn.Module):
    """Logistic regression on sparse features: scores of class 0, which are zero, and of class 1.

    It begins with zeros, as the loss is convex.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Embedding(features, 1)
        nn.init.zeros_(self.weight.weight)

    def forward(self, index: Tensor, value: Tensor) -> Tensor:
        score = (self.weight(index).squeeze(-1) * value).sum(dim=1, keepdim=True)
        return functional.pad(score, (1, 0))
