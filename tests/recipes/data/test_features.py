"""Features of a data set: the transform's, kept once, and made again when the file is not whole."""

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hush.data import Dataset, load, with_features
from hush_recipes.data import features
from hush_recipes.data.scattering import scatter


@pytest.fixture
def digits() -> Dataset:
    whole = load("digits")
    return Dataset(
        name="digits",
        x_train=whole.x_train[:200],
        y_train=whole.y_train[:200],
        x_test=whole.x_test[:70],
        y_test=whole.y_test[:70],
        classes=10,
    )


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images were worked out, each time some were."""
    counted: list[int] = []

    def counting(images: Any, shape: Any, device: str) -> Any:
        counted.append(len(images))
        return _plain(images, shape, device)

    monkeypatch.setattr(features, "_scattering", counting)
    return counted


_plain = features._scattering


def test_features_are_the_transform_s_and_made_once(
    digits: Dataset, computed: list[int], tmp_path: Path
) -> None:
    first = with_features(digits, "scattering", cache=tmp_path)
    assert first.shape == (81, 2, 2)
    torch.testing.assert_close(
        torch.from_numpy(first.x_train), scatter(torch.from_numpy(digits.x_train))
    )
    assert np.array_equal(first.y_train, digits.y_train)
    repeated = with_features(digits, "scattering", cache=tmp_path)
    assert np.array_equal(first.x_train, repeated.x_train)
    assert np.array_equal(first.x_test, repeated.x_test)
    assert computed == [200, 70]
    files = list(tmp_path.iterdir())
    assert len(files) == 2, "no drafts are left"
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "longer"])
def test_a_damaged_file_is_made_anew(
    digits: Dataset, computed: list[int], tmp_path: Path, damage: str
) -> None:
    first = with_features(digits, "scattering", cache=tmp_path)
    (file,) = tmp_path.glob("*train*")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    whole = file.read_bytes()
    broken = {"flip": bytes(content), "cut": whole[:-5], "empty": b"", "longer": whole + b"0"}
    file.write_bytes(broken[damage])
    repeated = with_features(digits, "scattering", cache=tmp_path)
    assert np.array_equal(first.x_train, repeated.x_train)
    assert computed == [200, 70, 200]
    assert file.read_bytes() == whole


def test_other_records_are_another_file(digits: Dataset, computed: list[int], tmp_path: Path) -> None:
    with_features(digits, "scattering", cache=tmp_path)
    changed = digits.x_train.copy()
    changed[17, 0, 3, 3] += np.float32(1e-3)
    altered = Dataset(**{**vars(digits), "x_train": changed})
    recomputed = with_features(altered, "scattering", cache=tmp_path)
    assert computed == [200, 70, 200]
    torch.testing.assert_close(torch.from_numpy(recomputed.x_train), scatter(torch.from_numpy(changed)))
