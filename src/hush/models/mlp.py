"""The two-layer network for tables."""

import math

from torch import nn

HIDDEN = 32


def mlp(classes: int, shape: tuple[int, ...]) -> nn.Module:
    """Two fully connected layers with 32 hidden units, as for Adult in 004 (Table 1)."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(math.prod(shape), HIDDEN),
        nn.Tanh(),
        nn.Linear(HIDDEN, classes),
    )
