"""Scattering features normalised by statistics that are paid for: docs/guarantees/baselines.md, 1."""

import math
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn

from hush.accounting.ledger.ledger import Ledger
from hush.models.networks import FrozenNorm
from hush.training.methods.moments import NoisyMoments
from hush.training.methods.whitening import NoisyWhitening
from recipes.dpsur.inputs import GROUPS, Inputs, transform

Statistics = Literal["channels", "features", "whitening"]
# Squares of normalised features are held within this many times the root of their number; those of
# normal numbers would be about 1.7 times it.
_SQUARES = 2.4


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
