import hashlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hush.data import public_order
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
