"""Networks of hush itself, and how those of other distributions are found."""

import pytest
import torch

from hush.core.errors import Unsupported
from hush.models import build


def test_logistic_begins_at_zero() -> None:
    assert not build("logistic", classes=10, shape=(1, 8, 8))(torch.rand(2, 1, 8, 8)).any()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(Unsupported, match="logistic, mlp, linear, cnn, cifar-cnn, efficientnet-linear"):
        build("resnet", classes=10, shape=(3, 32, 32))


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 10, 13)])
def test_the_convolution_takes_images_of_any_size(shape: tuple[int, ...]) -> None:
    assert build("cnn", classes=4, shape=shape)(torch.rand(2, *shape)).shape == (2, 4)
