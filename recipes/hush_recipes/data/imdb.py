"""IMDB reviews as word ranks: the two classes are film reviews that are negative and positive.

The word list, and with it the ranks, was published with the data set and was counted on its
training reviews; here it is taken as public, as in all published work on these files.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError
from hush.core.value import check_count
from hush.data import Dataset, public_order
from hush_recipes.data.formats import parse_npz
from hush_recipes.data.published import find_directory, read_published

LENGTH = 256
VOCABULARY = 10_000
PADDING = 0


def read_imdb(
    directory: str | Path | None = None, length: int = LENGTH, vocabulary: int = VOCABULARY
) -> Dataset:
    """Reviews as `length` token ids below `vocabulary`; label 1 is a positive review.

    Id 0 is padding, ids up to vocabulary - 2 are word ranks, and vocabulary - 1 stands for every
    rarer word.
    """
    check_count("length", length, "a review keeps that many words", at_least=1)
    check_count("vocabulary", vocabulary, "padding, a word and 'unknown' need an id", at_least=3)
    folder = find_directory("imdb", directory)
    (content,) = read_published("imdb", folder)
    source = f"imdb: {folder / 'imdb' / 'imdb_tokens.npz'}"
    parts = []
    for part in ("train", "test"):
        stored = (f"x_{part}_flat", f"x_{part}_len", f"y_{part}")
        flat, lengths, labels = parse_npz(content, source, stored)
        _check_lengths(source, flat, lengths, labels)
        # The published rows are sorted by class.
        order = public_order(len(labels))
        rows = _rows(flat, lengths.astype(np.int64), length, vocabulary)
        parts.append((rows[order], labels[order].astype(np.int64)))
    (x_train, y_train), (x_test, y_test) = parts
    return Dataset(
        name="imdb", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=2
    )


def _check_lengths(source: str, flat: NDArray[Any], lengths: NDArray[Any], labels: NDArray[Any]) -> None:
    if flat.ndim != 1 or lengths.shape != labels.shape or lengths.sum(dtype=np.int64) != len(flat):
        raise DataError(
            f"{source}: words {flat.shape}, lengths {lengths.shape} that sum to {lengths.sum()}, "
            f"and labels {labels.shape} do not belong together."
        )
    if np.any(lengths < 0) or np.any(flat < 1):
        raise DataError(f"{source}: lengths must be >= 0 and word ranks >= 1.")


def _rows(
    flat: NDArray[Any], lengths: NDArray[np.int64], length: int, vocabulary: int
) -> NDArray[np.int64]:
    """The last `length` words of each review (the verdict comes last), padded at the end."""
    words = np.minimum(lengths, length)
    begin = np.cumsum(lengths) - words
    column = np.arange(length)
    holds_word = column < words[:, np.newaxis]
    rows = np.full(holds_word.shape, PADDING, dtype=np.int64)
    rows[holds_word] = flat[(begin[:, np.newaxis] + column)[holds_word]]
    return np.minimum(rows, vocabulary - 1)
