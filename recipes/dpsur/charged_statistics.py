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
from recipes.dpsur.inputs import GROUPS, Inputs, changed

Paid = Literal["channels", "features", "whitening"]
# Squares of normalised features are held within this many times the root of their number; those of
# normal numbers would be about 1.7 times it.
_SQUARES = 2.4


def normalised_by(paid: Paid, noise: float, inputs: Inputs, ledger: Ledger, seed: int) -> Inputs:
    """The inputs by noisy moments of each channel or each feature, or whitened; charged to `ledger`.

    The norms hold for features that are normalised in groups, whatever the image; but for the squares
    of every feature, of which a few may be cut off.
    """
    features = inputs.train[0]
    # a source of its own: noise is drawn on the CPU
    normalise = _fitted(paid, noise, features, ledger, torch.Generator().manual_seed(2**32 - 1 - seed))
    normalise.to(features.device)
    (x, y), (x_test, y_test) = inputs.train, inputs.test
    return replace(inputs, train=(changed(x, normalise), y), test=(changed(x_test, normalise), y_test))


def _fitted(
    paid: Paid, noise: float, features: Tensor, ledger: Ledger, source: torch.Generator
) -> nn.Module:
    channels, root = features.shape[1], math.sqrt(features[0].numel())
    if paid == "whitening":
        whitening = NoisyWhitening(multiplier=noise, norm=root, square_norm=channels)
        return whitening(features, ledger, generator=source)
    if paid == "features":
        moments = NoisyMoments(multiplier=noise, norm=root, square_norm=_SQUARES * root, floor=0.05)
        found = moments(features.flatten(1), ledger, generator=source)
        return FrozenNorm(*(each.view(features.shape[1:]) for each in (found.mean, found.variance)))
    held = channels / math.sqrt(GROUPS)
    moments = NoisyMoments(multiplier=noise, norm=math.sqrt(channels), square_norm=held, floor=0.01)
    found = moments(features, ledger, generator=source)
    return FrozenNorm(found.mean, found.variance)
