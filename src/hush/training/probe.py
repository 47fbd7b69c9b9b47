"""The geometry of a model's gradients after some steps: which clipping would fit them."""

import torch
from torch import Tensor, nn

from hush.gradients.geometry import Geometry, geometry
from hush.training.gradient_rows import finite, gradient_rows

_AT_ONCE = 250


def probe(
    model: nn.Module,
    loss: nn.Module,
    reference: tuple[Tensor, Tensor],
    measured: tuple[Tensor, Tensor],
    *,
    steps: int,
    learning_rate: float,
    momentum: float = 0.9,
) -> Geometry:
    """Train on `measured` without any privacy, then measure its gradients beside those of `reference`.

    What comes back is a function of the records with no noise in it: both sets must be public.
    """
    descend(model, loss, measured, steps=steps, learning_rate=learning_rate, momentum=momentum)
    return geometry(*(finite(gradient_rows(model, loss, part)) for part in (reference, measured)))


def descend(
    model: nn.Module,
    loss: nn.Module,
    data: tuple[Tensor, Tensor],
    *,
    steps: int,
    learning_rate: float,
    momentum: float = 0.9,
) -> None:
    """Take steps of gradient descent on all of the data, without any privacy."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    inputs, targets = data
    for _ in range(steps):
        optimizer.zero_grad()
        for x, y in zip(inputs.split(_AT_ONCE), targets.split(_AT_ONCE), strict=True):
            (loss(model(x), y) * (len(x) / len(inputs))).backward()
        optimizer.step()
    optimizer.zero_grad()
