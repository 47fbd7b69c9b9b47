"""Fixed features of a data set's images, and of the images that are drawn for it.

Grey images have scattering features; clothes and photographs responses of patches
(`hush_recipes.records.patches`) beside them.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hush.data import Dataset, load
from hush_recipes.data.features import cache_directory, cached, scattering_features
from hush_recipes.data.scattering import scatter
from hush_recipes.records.drawings import Draw, shapes, strokes
from hush_recipes.records.leaves import leaves
from hush_recipes.records.patches import Patches, PatchResponses

DRAWN = 8_000
"""Pairs of images."""
_AT_ONCE = 100


@dataclass(frozen=True, kw_only=True)
class FeatureMap:
    """Fixed features of a data set of images, and the images that are drawn for it."""

    dataset: str
    draw: Draw
    patches: Patches | None = None
    """None: scattering."""
    opponent: bool = False
    """Whether scattering is of opponent colours, and a mean over an image and its mirror image."""


_CLOTHES = FeatureMap(dataset="fashion-mnist", draw=shapes)
_PHOTOGRAPHS = FeatureMap(dataset="cifar10", draw=leaves, patches=Patches())
FEATURE_MAPS: Mapping[str, tuple[FeatureMap, ...]] = {
    "fashion-mnist": (
        _CLOTHES,
        replace(_CLOTHES, patches=Patches(count=384, grid=3, mirrored=False)),
    ),
    "mnist": (FeatureMap(dataset="mnist", draw=strokes),),
    "cifar10": (_PHOTOGRAPHS, replace(_PHOTOGRAPHS, patches=None, opponent=True)),
}
"""By data set; the features of several are put side by side."""


def features_of(features: FeatureMap, device: str) -> Dataset:
    """The data set with features as inputs; computed once and cached."""
    dataset = load(features.dataset)
    if features.patches is None and not features.opponent:
        return scattering_features(dataset, device=device)
    train, test = (_cached(features, images, device) for images in (dataset.x_train, dataset.x_test))
    return replace(dataset, x_train=train, x_test=test)


@lru_cache(maxsize=2)
def drawn_features(features: FeatureMap, device: str) -> tuple[Tensor, Tensor]:
    """Features of the pairs of images that are drawn for a data set."""
    first, second = (_in_parts(features, images, device) for images in _drawn(features.draw))
    return first.to(device), second.to(device)


@lru_cache(maxsize=1)
def _drawn(draw: Draw) -> tuple[Tensor, Tensor]:
    return draw(DRAWN, torch.Generator().manual_seed(0))


@lru_cache(maxsize=1)
def _extractor(features: FeatureMap) -> Callable[[Tensor], Tensor]:
    """The map from images to features."""
    if features.patches is None:
        return _opponent_scatter if features.opponent else scatter
    responses: PatchResponses = features.patches.fit(torch.cat(_drawn(features.draw)))
    return responses


def _opponent_scatter(images: Tensor) -> Tensor:
    """Means over images and their mirror images, whose halves say much the same: one is kept."""
    red, green, blue = images.unbind(1)
    grey, yellow = images.mean(1), (red + green) / 2
    colours = torch.stack([grey, (1 + red - green) / 2, (1 + blue - yellow) / 2], 1)
    means = (scatter(colours) + scatter(colours.flip(3))) / 2
    return means[..., : means.shape[3] // 2]


def _cached(features: FeatureMap, images: NDArray[Any], device: str) -> NDArray[np.float32]:
    extract = _extractor(features)
    shape = (len(images), *extract(torch.from_numpy(images[:1])).shape[1:])
    of = "opponent scattering"
    if isinstance(extract, PatchResponses):
        of = f"{extract.patches} of {DRAWN} pairs of {features.draw.__name__} {extract.digest()}"

    def compute() -> NDArray[np.float32]:
        extracted: NDArray[np.float32] = _in_parts(features, torch.from_numpy(images), device).numpy()
        return extracted

    return cached(cache_directory(), re.sub(r"\W+", "-", of).lower(), images, shape, compute)


def _in_parts(features: FeatureMap, images: Tensor, device: str) -> Tensor:
    """Features on the CPU; into one piece of memory, as small ones kept between large ones waste it."""
    extract = _extractor(features)
    on = "cpu" if features.patches else device
    output = torch.empty(len(images), *extract(images[:1].to(on)).shape[1:])
    for some, place in zip(images.split(_AT_ONCE), output.split(_AT_ONCE), strict=True):
        place.copy_(extract(some.to(on)))
    return output
