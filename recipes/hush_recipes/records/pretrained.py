"""CIFAR-10 with public ImageNet weights: the last blocks of EfficientNet-Lite0, trained privately.

Its first blocks are fixed, so that what they make of an image is computed once. Batch norms keep the
statistics of ImageNet, and by these what is trained is given centred inputs: otherwise most of a
gradient's length is the mean of the inputs. A test image is scored together with its mirror image.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from hush.accounting.ledger import Ledger
from hush.data import load, tensors
from hush_recipes.data.efficientnet import FEATURES, enlarged, network
from hush_recipes.dpsur.inputs import Inputs
from hush_recipes.figure import Figure
from hush_recipes.records.descent import Descent
from hush_recipes.records.images import HELD_OUT
from hush_recipes.records.protocol import (
    Job,
    Outcome,
    final,
    search,
    with_held_out,
    with_settings,
)

_AT_ONCE = 250
_QUANTILES = 1000


@dataclass(frozen=True, kw_only=True)
class Settings(Descent):
    """Settings of a run."""

    first: int = 11
    """The first of the 16 blocks that is trained."""
    scale: float = 0.7
    """Of the features that the last layer is given, in their standard deviations over ImageNet."""
    projections: bool = False
    """Whether of the convolutions only those are trained that close a block (its projections)."""
    centred: bool = False
    """Whether projections are given their inputs less the mean over ImageNet."""
    pairs: int = 0
    """Pairs of an image and a mirror image that a record has, 0 (its image alone), 1 or 2. Images of the
    second are moved by a pixel along both axes."""
    multiplicity: int = 2
    """How many of them a step takes, and the mean of their gradients (augmentation multiplicity): a pair
    at random, or with 1 any image."""
    shifted: bool = False
    """Whether a test image is also scored moved by a pixel along both axes, the four diagonal ways
    (test-time augmentation)."""


class LastBlocks(nn.Module):
    """What follows the fixed blocks, and a new last layer, which begins at zero."""

    mean: Tensor
    spread: Tensor

    def __init__(self, pretrained: Any, settings: Settings, classes: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*pretrained._blocks[settings.first :])
        self.widen = nn.Sequential(pretrained._conv_head, pretrained._bn1, nn.ReLU6())
        mean, deviation = rectified_moments(pretrained._bn1)
        self.register_buffer("mean", mean)
        self.register_buffer("spread", settings.scale / deviation)
        self.head = nn.Linear(FEATURES, classes)
        for parameter in self.head.parameters():
            nn.init.zeros_(parameter)
        self.requires_grad_(True)
        for block in self.blocks:  # few weights, whose gradients take as long as all others'
            block._depthwise_conv.requires_grad_(False)
        if settings.projections:
            for convolution in (self.widen[0], *(block._expand_conv for block in self.blocks)):
                convolution.requires_grad_(False)
        if settings.centred:
            for block in self.blocks:
                centre_projection(block)

    def forward(self, activations: Tensor) -> Tensor:
        features = self.widen(self.blocks(activations.float())).mean((2, 3))
        scores: Tensor = self.head((features - self.mean) * self.spread)
        return scores


class Centred(nn.Module):
    """A 1 x 1 convolution of centred inputs: a fixed mean is subtracted from them."""

    mean: Tensor

    def __init__(self, convolution: nn.Conv2d, mean: Tensor) -> None:
        super().__init__()
        self.convolution = convolution
        self.register_buffer("mean", mean[:, None, None])

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.convolution(inputs - self.mean.to(inputs.dtype))
        return outputs


@torch.no_grad()
def centre_projection(block: Any) -> None:
    """Centre the inputs of a block's projection, by the moments of the batch norm before it.

    The batch norm after it makes up for that: the block computes what it did. A gradient of the
    projection no longer has the mean of its inputs in it, which is most of its length, and which that
    norm's bias can learn.
    """
    mean, _ = rectified_moments(block._bn1)
    block._bn2.running_mean -= block._project_conv.weight.flatten(1) @ mean
    block._project_conv = Centred(block._project_conv, mean)


@torch.no_grad()
def rectified_moments(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel after ReLU6, if before it had those that the norm is for."""
    middle = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    normal = torch.special.ndtri(middle)[:, None]
    values = functional.relu6(norm.bias.double() + norm.weight.double().abs() * normal)
    return values.mean(0).float(), values.std(0).float()


class MeanOverViews(nn.Module):
    """Scores of a record that is given as several images: their mean."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, records: Tensor) -> Tensor:
        scores: Tensor = self.model(records.flatten(0, 1)).unflatten(0, records.shape[:2]).mean(1)
        return scores


def run(job: Job[Settings]) -> Outcome:
    """Accuracy of one training run."""
    settings = job.settings
    inputs = _inputs(
        job.data, job.held_out, settings.first, settings.pairs, settings.shifted, job.device
    )
    model = LastBlocks(network(), settings, inputs.classes).to(job.device)
    model.eval()  # batch norms keep their statistics
    return settings.train(
        model,
        inputs,
        job.epsilon,
        Ledger(),
        job.seed,
        scored=MeanOverViews(model),
        views=partial(random_views, multiplicity=settings.multiplicity) if settings.pairs else None,
    )


def random_views(record: Tensor, multiplicity: int) -> Tensor:
    """Augmented views of a record for one step: `multiplicity` consecutive ones, chosen at random."""
    choices: Tensor = record.unflatten(0, (-1, multiplicity))
    chosen = torch.randint(len(choices), (1,), device=record.device)
    return choices.index_select(0, chosen).squeeze(0)


@lru_cache(maxsize=1)
def _inputs(data: str, held_out: int, first: int, pairs: int, shifted: bool, device: str) -> Inputs:
    """Activations of a data set's images on the device, kept from run to run: no run changes them."""
    dataset = with_held_out(load(data), held_out)
    x, y, x_test, y_test = tensors(dataset)
    fixed = network().to(device)

    def side_by_side(views: Iterable[Tensor]) -> Tensor:
        return torch.stack([activations(fixed, images, first, device) for images in views], 1)

    if pairs:
        moved = diagonal_shifts(x) if pairs > 1 else [x]
        x = side_by_side((x, x.flip(3), moved[0], moved[-1].flip(3))[: 2 * pairs])
    else:
        x = activations(fixed, x, first, device)
    scored = [x_test, *(diagonal_shifts(x_test) if shifted else ())]
    x_test = side_by_side(view for images in scored for view in (images, images.flip(3)))
    return Inputs(classes=dataset.classes, train=(x, y.to(device)), test=(x_test, y_test.to(device)))


def diagonal_shifts(images: Tensor) -> list[Tensor]:
    """Images moved by a pixel along both axes, the four diagonal ways; their edges are repeated."""
    padded = functional.pad(images, [1, 1, 1, 1], mode="replicate")
    height, width = images.shape[2:]
    return [padded[:, :, top : top + height, left : left + width] for top in (0, 2) for left in (0, 2)]


@torch.no_grad()
def activations(pretrained: Any, images: Tensor, first: int, device: str) -> Tensor:
    """What blocks before the first trained one make of images, in half precision, on the device."""
    parts: list[Tensor] = []
    for some in images.split(_AT_ONCE):
        rows = enlarged(some.to(device))
        rows = pretrained._swish(pretrained._bn0(pretrained._conv_stem(rows)))
        for block in pretrained._blocks[:first]:
            rows = block(rows)
        parts.append(rows.half().contiguous())
    return torch.cat(parts)


_NAME = "EfficientNet-Lite0, last blocks"
_MIRRORED = Settings(rate=5.0, steps=160, bfloat16=True, pairs=1)
_MOVED = replace(_MIRRORED, pairs=2, shifted=True)
_CHOSEN = {3.0: replace(_MOVED, projections=True, centred=True)}
_ONE_VIEW = replace(_MOVED, multiplicity=1)
_CANDIDATES = {
    3.0: {
        f"rate {rate:g}, scale {scale:g}, {steps} steps": Settings(rate=rate, scale=scale, steps=steps)
        for rate, scale, steps in (
            (0.3, 0.1, 100),
            (0.3, 2.0, 60),
            (1.0, 1.0, 60),
            (3.0, 1.0, 60),
            (6.0, 0.7, 60),
            (10.0, 0.7, 60),
            (8.0, 0.5, 120),
            (5.0, 0.7, 120),
            (5.0, 0.7, 160),
        )
    }
    | {
        "mirror images, bfloat16": _MIRRORED,
        "mirror images, bfloat16, moved test images": replace(_MIRRORED, shifted=True),
        "mirror images, bfloat16, moved images": _MOVED,
    }
    | {
        f"one view of four: {name}": settings
        for name, settings in {
            "all": _ONE_VIEW,
            "all, centred": replace(_ONE_VIEW, centred=True),
            "projections": replace(_ONE_VIEW, projections=True),
            "projections, centred": replace(_ONE_VIEW, projections=True, centred=True),
            "projections, centred, rate 8": replace(_ONE_VIEW, projections=True, centred=True, rate=8.0),
        }.items()
    }
    | {"chosen: projections, centred, a pair of views": _CHOSEN[3.0]}
}


def records_cifar10_imagenet_search(
    *,
    epsilons: Sequence[float] | None = None,
    seeds: int = 1,
    device: str = "cuda",
    processes: int | None = 1,
) -> Figure:
    """CIFAR-10 with ImageNet weights: candidates, on held-out training records."""
    candidates = {level: _CANDIDATES[level] for level in with_settings(epsilons, _CANDIDATES)}
    return search(
        "records-cifar10-imagenet-search",
        run,
        "cifar10",
        candidates,
        held_out=HELD_OUT["cifar10"],
        seeds=seeds,
        device=device,
        processes=processes,
    )


def records_cifar10_imagenet(
    *,
    epsilons: Sequence[float] | None = None,
    seeds: int = 5,
    device: str = "cuda",
    processes: int | None = 1,
) -> Figure:
    """CIFAR-10 with ImageNet weights: test accuracy of EfficientNet-Lite0's last blocks."""
    chosen = {level: (_NAME, _CHOSEN[level]) for level in with_settings(epsilons, _CHOSEN)}
    return final(
        "records-cifar10-imagenet",
        run,
        "cifar10",
        chosen,
        seeds=seeds,
        device=device,
        processes=processes,
    )
