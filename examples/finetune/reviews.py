"""IMDB reviews as word pieces of a pretrained encoder, cut to a public length.

Everything here is done to each review by itself, with a public tokenizer: nothing is learned from the
reviews, so that nothing is released of them.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hush.core.errors import DataError
from hush.data import public_order
from hush_recipes.data.formats import parse_npz
from hush_recipes.data.published import find_directory, read_published

PADDING, START, END = 0, 101, 102
"""Ids of [PAD], [CLS] and [SEP] in BERT's vocabulary."""
LINE_BREAK = "br"
"""What is left of an HTML tag in the published words."""

_ARRAYS = ("pieces", "lengths", "labels")


@dataclass(frozen=True, eq=False)
class Reviews:
    """Word pieces of reviews, one review after another, and a label each (1: positive)."""

    pieces: NDArray[np.int16]
    lengths: NDArray[np.int64]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, length: int, first: int = 0) -> Tensor:
        """Token ids, a row of `length` a review, padded at the end.

        Args:
            length: tokens a row, [CLS] and [SEP] included.
            first: pieces taken from the beginning of a longer review; the others are its last ones.
        """
        room = length - 2
        rows = np.full((len(self), length), PADDING, dtype=np.int64)
        rows[:, 0] = START
        ends = np.cumsum(self.lengths)
        for row, end, count in zip(rows, ends, self.lengths, strict=True):
            kept = _cut(self.pieces[end - count : end], first, room - first)
            row[1 : 1 + len(kept)] = kept
            row[1 + len(kept)] = END
        return torch.from_numpy(rows)

    def part(self, begin: int, end: int | None) -> "Reviews":
        """The reviews of a range of rows."""
        edges = np.concatenate([[0], np.cumsum(self.lengths)])
        stop = len(self) if end is None else end
        return Reviews(
            self.pieces[edges[begin] : edges[stop]], self.lengths[begin:stop], self.labels[begin:stop]
        )


def _cut(pieces: NDArray[np.int16], first: int, last: int) -> NDArray[np.int16]:
    if len(pieces) <= first + last:
        return pieces
    return np.concatenate([pieces[:first], pieces[len(pieces) - last :]])


def read_reviews(tokenizer: Any, directory: str | Path | None = None) -> tuple[Reviews, Reviews]:
    """Training and test reviews from the published words, in an order that does not depend on them.

    Args:
        tokenizer: of the encoder, as the transformers library loads it; BERT's vocabulary.
        directory: folder with imdb/imdb_tokens.npz; None: HUSH_DATA of the environment.
    """
    folder = find_directory("imdb", directory)
    (content,) = read_published("imdb", folder)
    stored = [f"{name}_{part}{end}" for part in ("train", "test") for name, end in _PUBLISHED]
    words, *arrays = parse_npz(content, "imdb/imdb_tokens.npz", ("vocab", *stored))
    vocabulary = words.item().decode().split("\n")
    train = _tokenized(tokenizer, vocabulary, *arrays[:3])
    return train, _tokenized(tokenizer, vocabulary, *arrays[3:])


_PUBLISHED = (("x", "_flat"), ("x", "_len"), ("y", ""))


def _tokenized(
    tokenizer: Any,
    vocabulary: list[str],
    ranks: NDArray[Any],
    counts: NDArray[Any],
    labels: NDArray[Any],
) -> Reviews:
    """Pieces of each word by itself: BERT's tokenizer splits at white space first."""
    by_word = [
        [] if word == LINE_BREAK else ids
        for word, ids in zip(
            vocabulary, tokenizer(vocabulary, add_special_tokens=False)["input_ids"], strict=True
        )
    ]
    ends = np.cumsum(counts.astype(np.int64))
    pieces = [
        np.array([piece for rank in ranks[end - count : end] for piece in by_word[rank - 1]], np.int16)
        for end, count in zip(ends, counts, strict=True)
    ]
    order = public_order(len(labels))  # the published rows are sorted by class
    return Reviews(
        np.concatenate([pieces[row] for row in order]),
        np.array([len(pieces[row]) for row in order]),
        labels[order].astype(np.int64),
    )


def save_reviews(path: Path, train: Reviews, test: Reviews) -> None:
    """Write tokenized reviews, for a machine without the published files."""
    arrays = {
        f"{name}_{part}": getattr(reviews, name)
        for part, reviews in (("train", train), ("test", test))
        for name in _ARRAYS
    }
    np.savez_compressed(path, **arrays)


def load_reviews(path: Path) -> tuple[Reviews, Reviews]:
    """Training and test reviews that `save_reviews` wrote."""
    if not path.is_file():
        raise DataError(f"{path} is not there: write it with `python -m examples.finetune prepare`.")
    names = [f"{name}_{part}" for part in ("train", "test") for name in _ARRAYS]
    arrays = parse_npz(path.read_bytes(), str(path), names)
    return Reviews(*arrays[:3]), Reviews(*arrays[3:])
