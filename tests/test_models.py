"""Networks of hush itself, and how those of other distributions are found."""

import math

import pytest
import torch

from hush.core.errors import InvalidValue, Unsupported
from hush.models import build, default_model


def test_logistic_begins_at_zero() -> None:
    assert not build("logistic", classes=10, shape=(1, 8, 8))(torch.rand(2, 1, 8, 8)).any()


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(Unsupported, match="logistic, mlp, cifar-cnn, efficientnet-linear"):
        build("resnet", classes=10, shape=(3, 32, 32))


@pytest.mark.parametrize("classes", [1, 2.5, math.nan])
def test_classes_must_be_a_count(classes: int) -> None:
    with pytest.raises(InvalidValue, match="classes="):
        build("logistic", classes=classes, shape=(4,))


def test_without_other_distributions_two_networks_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hush.core.extensions.entry_points", lambda **_: ())
    assert (default_model("digits"), default_model("mnist", "scattering")) == ("logistic", "mlp")
    with pytest.raises(Unsupported, match=r"There are logistic, mlp\. .*pip install ./recipes"):
        build("mnist-cnn", classes=10, shape=(1, 28, 28))
