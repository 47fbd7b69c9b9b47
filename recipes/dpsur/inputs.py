"""Data and networks of the DPSUR paper's comparison."""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from hush.data import load, tensors
from hush.data.features import with_features
from hush.models import build

GROUPS = 27
_BATCH = 1000


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
        for place, layer in enumerate(model):
            if place == 0 and isinstance(layer, nn.GroupNorm):
                model[place] = nn.Identity()
            if relu and isinstance(layer, nn.Tanh):
                model[place] = nn.ReLU()
    return model
