"""Features of data sets and of what is drawn for them: cached, and of the same map."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hush.data import Dataset
from hush_recipes.records import extraction
from hush_recipes.records.extraction import FEATURE_MAPS, drawn_features, features_of


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HUSH_CACHE", str(tmp_path))
    monkeypatch.setattr(extraction, "DRAWN", 30)
    for kept in (extraction.drawn_features, extraction._drawn, extraction._extractor):
        kept.cache_clear()


@pytest.mark.parametrize(
    ("data", "number", "shape", "features"),
    [
        ("mnist", 0, (1, 28, 28), (81, 7, 7)),
        ("fashion-mnist", 1, (1, 28, 28), (8, 3, 3)),
        ("cifar10", 0, (3, 32, 32), (8, 2, 2)),
        ("cifar10", 1, (3, 32, 32), (243, 8, 4)),
    ],
)
def test_records_and_drawn_images_have_features_of_one_map(
    data: str,
    number: int,
    shape: tuple[int, ...],
    features: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    feature_map = FEATURE_MAPS[data][number]
    if feature_map.patches is not None:
        feature_map = replace(feature_map, patches=replace(feature_map.patches, count=4))
    first, _ = extraction._drawn(feature_map.draw)
    images, labels = first.numpy(), np.zeros(30, np.int64)
    dataset = Dataset(
        name=data, x_train=images, y_train=labels, x_test=images[:10], y_test=labels[:10], classes=10
    )
    monkeypatch.setattr(extraction, "load", lambda _: dataset)
    assert images.shape[1:] == shape
    extracted = features_of(feature_map, "cpu")
    assert extracted.shape == features
    torch.testing.assert_close(
        torch.from_numpy(extracted.x_train), drawn_features(feature_map, "cpu")[0]
    )
    np.testing.assert_array_equal(extracted.x_test, extracted.x_train[:10])
    assert np.array_equal(features_of(feature_map, "cpu").x_train, extracted.x_train)  # from its file
    other = replace(dataset, x_train=images[::-1].copy())
    monkeypatch.setattr(extraction, "load", lambda _: other)
    np.testing.assert_allclose(
        features_of(feature_map, "cpu").x_train, extracted.x_train[::-1], rtol=1e-5, atol=1e-7
    )
