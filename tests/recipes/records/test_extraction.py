"""Features of data sets and of what is drawn for them: cached, and of the same map."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hush.data import Dataset
from hush_recipes.records import extraction
from hush_recipes.records.drawings import shapes, strokes
from hush_recipes.records.extraction import FEATURE_MAPS, FeatureMap, drawn_features, features_of
from hush_recipes.records.patches import Patches


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


def test_features_of_other_drawings_are_other_features(monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(0)).numpy()
    labels = np.zeros(20, np.int64)
    dataset = Dataset(
        name="mnist", x_train=images, y_train=labels, x_test=images, y_test=labels, classes=10
    )
    monkeypatch.setattr(extraction, "load", lambda _: dataset)
    by_shapes = FeatureMap(dataset="mnist", draw=shapes, patches=Patches(count=4, mirrored=False))

    def other_shapes(count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return shapes(count, generator.manual_seed(1))

    other_shapes.__name__ = "shapes"
    first = features_of(by_shapes, "cpu").x_train
    for draw in (strokes, other_shapes):
        second = features_of(replace(by_shapes, draw=draw), "cpu").x_train
        assert np.abs(first - second).max() > 0.05
    np.testing.assert_array_equal(features_of(by_shapes, "cpu").x_train, first)


def test_opponent_colours_forget_left_and_right_and_keep_hue() -> None:
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    extracted = extraction._opponent_scatter(images)
    torch.testing.assert_close(extraction._opponent_scatter(images.flip(3)), extracted)
    grey = images.mean(1, keepdim=True).expand(-1, 3, -1, -1)
    without_hue = extraction._opponent_scatter(grey)
    torch.testing.assert_close(without_hue[:, :81], extracted[:, :81])
    # the average of a colour that is not there is in the middle, and its wavelets are silent
    torch.testing.assert_close(without_hue[:, [81, 162]], torch.full_like(extracted[:, :2], 0.5))
    assert float(without_hue[:, 82:162].abs().max()) < 1e-5 < float(extracted[:, 82:162].max())
