"""Data and networks of the DPSUR paper's comparison; features normalised by statistics that are charged.

The statistics: docs/guarantees/baselines.md, 1.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor, nn

from hush.accounting.ledger import Ledger
from hush.data import load, tensors, with_features
from hush.models import build
from hush_recipes.statistics.moments import NoisyMoments, NoisyWhitening

GROUPS = 27
_BATCH = 1000
Statistics = Literal["channels", "features", "whitening"]
# Squares of normalised features are held within this many times the root of their number; those of
# normal numbers would be about 1.7 times it.
_SQUARES = 2.4


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A data set on a device; features are normalised in groups already, record by record."""

    classes: int
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @property
    def records(self) -> int:
        return len(self.train[1])


@lru_cache(maxsize=2)
def inputs_on(data: str, features: bool, device: str) -> Inputs:
    """The data set or its scattering features on the device, kept from run to run."""
    dataset = load(data)
    if features:
        dataset = with_features(dataset, "scattering", device=device)
    x, y, x_test, y_test = tensors(dataset)
    if features:
        x, x_test = (normalised(values) for values in (x, x_test))
    x, y, x_test, y_test = (part.to(device) for part in (x, y, x_test, y_test))
    return Inputs(classes=dataset.classes, train=(x, y), test=(x_test, y_test))


def normalised(features: Tensor) -> Tensor:
    """The features in groups of channels, each record's of mean 0 and variance 1."""
    return transform(features, nn.GroupNorm(GROUPS, features.shape[1], affine=False))


@torch.no_grad()
def transform(features: Tensor, layer: nn.Module) -> Tensor:
    """A shape-preserving layer applied to the features, in batches of records."""
    output = torch.empty_like(features)
    for part, block in zip(features.split(_BATCH), output.split(_BATCH), strict=True):
        block.copy_(layer(part))
    return output


def network(name: str, inputs: Inputs, *, relu: bool = False) -> nn.Module:
    """A new network; what it would normalise is normalised already, so that layer does nothing."""
    model = build(name, classes=inputs.classes, shape=inputs.train[0].shape[1:])
    if isinstance(model, nn.Sequential):
        for index, layer in enumerate(model):
            if index == 0 and isinstance(layer, nn.GroupNorm):
                model[index] = nn.Identity()
            if relu and isinstance(layer, nn.Tanh):
                model[index] = nn.ReLU()
    return model


def normalised_by(kind: Statistics, noise: float, inputs: Inputs, ledger: Ledger, seed: int) -> Inputs:
    """The inputs by noisy moments of each channel or each feature, or whitened; charged to `ledger`.

    The norms hold for features that are normalised in groups, whatever the image; but for the squares
    of every feature, of which a few may be cut off.
    """
    features = inputs.train[0]
    # a source of its own: noise is drawn on the CPU
    normalise = _fitted(kind, noise, features, ledger, torch.Generator().manual_seed(2**32 - 1 - seed))
    normalise.to(features.device)
    (x, y), (x_test, y_test) = inputs.train, inputs.test
    return replace(
        inputs, train=(transform(x, normalise), y), test=(transform(x_test, normalise), y_test)
    )


class FrozenNorm(nn.Module):
    """Normalisation with fixed statistics: each channel less a mean, over a standard deviation.

    Mean and variance have the shape of a record, or of its first dimensions. They must be public, or
    private statistics that were charged (`NoisyMoments`).
    """

    mean: Tensor
    scale: Tensor

    def __init__(self, mean: Tensor, variance: Tensor) -> None:
        super().__init__()
        self.register_buffer("mean", mean.to(torch.float32))
        self.register_buffer("scale", variance.to(torch.float32).rsqrt())

    def forward(self, inputs: Tensor) -> Tensor:
        places = (*self.mean.shape, *[1] * (inputs.ndim - 1 - self.mean.ndim))
        return (inputs - self.mean.view(places)) * self.scale.view(places)


def _fitted(
    kind: Statistics, noise: float, features: Tensor, ledger: Ledger, source: torch.Generator
) -> nn.Module:
    channels, root = features.shape[1], math.sqrt(features[0].numel())
    if kind == "whitening":
        whitening = NoisyWhitening(multiplier=noise, norm=root, square_norm=channels)
        return whitening(features, ledger, generator=source)
    if kind == "features":
        moments = NoisyMoments(multiplier=noise, norm=root, square_norm=_SQUARES * root, floor=0.05)
        released = moments(features.flatten(1), ledger, generator=source)
        return FrozenNorm(
            *(part.view(features.shape[1:]) for part in (released.mean, released.variance))
        )
    bound = channels / math.sqrt(GROUPS)
    moments = NoisyMoments(multiplier=noise, norm=math.sqrt(channels), square_norm=bound, floor=0.01)
    released = moments(features, ledger, generator=source)
    return FrozenNorm(released.mean, released.variance)
