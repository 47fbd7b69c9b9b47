import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hush.core.errors import DataError, InvalidValue
from hush.data.dataset import public_order
from hush_recipes.data.imdb import read_imdb
from hush_recipes.data.published import FILES, Published

REVIEWS = [[1, 2, 3, 4, 5], [7], [], [5, 6]]
ARRAYS: dict[str, Any] = {
    f"{name}_{part}{suffix}": values
    for part in ("train", "test")
    for name, suffix, values in (
        ("x", "_flat", np.concatenate(REVIEWS).astype(np.int32)),
        ("x", "_len", np.array([len(review) for review in REVIEWS], np.int32)),
        ("y", "", np.array([0, 0, 1, 1], np.uint8)),
    )
}


def stored(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    buffer = io.BytesIO()
    np.savez(buffer, **{**ARRAYS, **changes})
    path = "imdb/imdb_tokens.npz"
    (folder / "imdb").mkdir()
    (folder / path).write_bytes(buffer.getvalue())
    sha256 = hashlib.sha256(buffer.getvalue()).hexdigest()
    monkeypatch.setitem(FILES, "imdb", (Published(path, sha256),))
    return folder


def test_reviews_are_cut_padded_and_shuffled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = read_imdb(stored(tmp_path, monkeypatch), length=3, vocabulary=7)
    expected = np.array([[3, 4, 5], [6, 0, 0], [0, 0, 0], [5, 6, 0]])
    order = public_order(4)
    for x, y in ((dataset.x_train, dataset.y_train), (dataset.x_test, dataset.y_test)):
        assert np.array_equal(x, expected[order])
        assert y.tolist() == np.array([0, 0, 1, 1])[order].tolist()
        assert x.dtype == np.int64
        assert y.dtype == np.int64


def test_rare_words_share_the_last_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = read_imdb(stored(tmp_path, monkeypatch), length=5, vocabulary=4)
    longest = dataset.x_train[public_order(4).tolist().index(0)]
    assert longest.tolist() == [1, 2, 3, 3, 3]


@pytest.mark.parametrize(
    "changes",
    [
        {"x_train_flat": np.array([1, 2])},
        {"y_test": np.array([0, 1])},
        {"x_test_flat": np.zeros(8, np.int32)},
        {"x_train_len": np.array([9, -1, 0, 0])},
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match=r"do not belong together|must be >= 0"):
        read_imdb(stored(tmp_path, monkeypatch, **changes))


def test_a_size_that_means_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="length=0"):
        read_imdb(tmp_path, length=0)
    with pytest.raises(InvalidValue, match="vocabulary=2"):
        read_imdb(tmp_path, vocabulary=2)
