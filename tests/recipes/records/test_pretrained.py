"""The record with ImageNet weights: the published network, of which a part is trained."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from hush.data import Dataset
from hush_recipes.data.efficientnet import FEATURES
from hush_recipes.dpsur.inputs import Inputs
from hush_recipes.records import pretrained
from hush_recipes.records.pretrained import LastBlocks, Settings
from hush_recipes.records.protocol import Job

RECORDS, CHANNELS, CLASSES = 300, 6, 3


class Block(nn.Module):
    """A block of the kind that the network has, with a part that stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._expand_conv = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)
        self._depthwise_conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS, bias=False)
        self._bn1 = nn.BatchNorm2d(CHANNELS)
        self._project_conv = nn.Conv2d(CHANNELS, CHANNELS, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu6(self._bn1(self._depthwise_conv(self._expand_conv(x))))
        output: Tensor = x + self._bn2(self._project_conv(inner))
        return output


class Pretrained(nn.Module):
    """A small network of the same parts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._blocks = nn.ModuleList(Block() for _ in range(2))
        self._conv_head = nn.Conv2d(CHANNELS, FEATURES, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(FEATURES)


def made_up(*_: Any) -> Inputs:
    """Activations of classes that differ in one channel each."""
    torch.manual_seed(1)
    labels = torch.arange(RECORDS) % CLASSES
    x = 0.5 * torch.randn(RECORDS, CHANNELS, 4, 4)
    x[torch.arange(RECORDS), labels] += 1.0
    both = torch.stack([x, x.flip(3)], 1)
    return Inputs(classes=CLASSES, train=(x.half(), labels), test=(both.half(), labels))


@pytest.mark.parametrize("projections", [False, True])
@pytest.mark.parametrize("centred", [False, True])
def test_a_run_spends_its_epsilon_learns_and_keeps_what_is_fixed(
    monkeypatch: pytest.MonkeyPatch, projections: bool, centred: bool
) -> None:
    trained: list[LastBlocks] = []

    def kept(*arguments: Any) -> LastBlocks:
        trained.append(LastBlocks(*arguments))
        return trained[-1]

    monkeypatch.setattr(pretrained, "_inputs", made_up)
    monkeypatch.setattr(pretrained, "network", Pretrained)
    monkeypatch.setattr(pretrained, "LastBlocks", kept)
    settings = Settings(first=1, rate=1.0, batch=100, steps=20, projections=projections, centred=centred)
    job = Job(data="made-up", held_out=0, settings=settings, epsilon=8.0, seed=3, device="cpu")
    outcome = pretrained.run(job)
    assert 7.9 < outcome.epsilon <= 8.0
    assert outcome.accuracy > 0.7
    start = LastBlocks(Pretrained(), settings, CLASSES).state_dict()
    after = trained[0].state_dict()
    moved = {name for name, value in start.items() if not torch.equal(value, after[name])}
    projection = "_project_conv.convolution" if centred else "_project_conv"
    expected = {"head.weight", "head.bias", "widen.1.weight", "widen.1.bias"}
    expected |= {f"blocks.0.{name}" for name in (f"{projection}.weight", "_bn1.weight", "_bn1.bias")}
    expected |= {"blocks.0._bn2.weight", "blocks.0._bn2.bias"}
    assert moved == expected | (
        set() if projections else {"blocks.0._expand_conv.weight", "widen.0.weight"}
    )


def test_views_of_an_image_are_it_moved_and_mirrored(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.arange(32.0).expand(2, 3, 32, 32) + 100 * torch.arange(32.0)[:, None]
    dataset = Dataset(
        name="made-up",
        x_train=pixels.numpy(),
        y_train=np.array([0, 1]),
        x_test=pixels.numpy(),
        y_test=np.array([0, 1]),
        classes=2,
    )
    monkeypatch.setattr(pretrained, "load", lambda _: dataset)
    monkeypatch.setattr(pretrained, "network", nn.Identity)
    monkeypatch.setattr(pretrained, "activations", lambda _, images, *__: images)
    pretrained._inputs.cache_clear()
    plain, mirrored, moved = (
        pretrained._inputs("", 0, 11, pairs, pairs > 0, "cpu") for pairs in (0, 1, 2)
    )
    assert torch.equal(plain.train[0], pixels)
    assert torch.equal(mirrored.train[0], torch.stack([pixels, pixels.flip(3)], 1))
    assert torch.equal(moved.train[0][:, :2], mirrored.train[0])
    assert torch.equal(moved.train[0][:, 2], moved.test[0][:, 2])
    assert torch.equal(moved.train[0][:, 3], moved.test[0][:, 9])
    assert torch.equal(mirrored.test[0], moved.test[0])
    assert torch.equal(plain.test[0], torch.stack([pixels, pixels.flip(3)], 1))
    assert torch.equal(moved.test[0][:, :2], plain.test[0])
    centres = [
        float(view[0, 0, 16, 16]) - float(pixels[0, 0, 16, 16]) for view in moved.test[0].unbind(1)
    ]
    assert centres[2::2] == [-101, -99, 99, 101], "a pixel up or down, and left or right"
    assert torch.equal(moved.test[0][:, 3::2], moved.test[0][:, 2::2].flip(4))


@pytest.mark.parametrize("pairs", [1, 2])
@pytest.mark.parametrize("blank", [0, 1])
def test_either_view_of_a_record_counts_in_its_gradient(
    monkeypatch: pytest.MonkeyPatch, blank: int, pairs: int
) -> None:
    views, labels = made_up().test
    seen = views.repeat(1, pairs, 1, 1, 1)
    seen[:, blank::2] = 0
    inputs = replace(made_up(), train=(seen, labels))
    monkeypatch.setattr(pretrained, "network", Pretrained)
    monkeypatch.setattr(pretrained, "_inputs", lambda *_: inputs)
    settings = Settings(first=1, rate=1.0, batch=100, steps=20, pairs=pairs, bfloat16=True)
    job = Job(data="made-up", held_out=0, settings=settings, epsilon=8.0, seed=3, device="cpu")
    outcome = pretrained.run(job)
    assert outcome.epsilon <= 8.0
    assert outcome.accuracy > 0.7
