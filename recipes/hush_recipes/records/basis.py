"""Inputs of length 1 from an image's features, in the principal basis of drawn images' features.

The basis has seen no record, and each record is mapped by itself: nothing here costs epsilon, and the
norm of every input is public.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hush_recipes.dpsur.inputs import normalised

_AT_ONCE = 2000


@dataclass(frozen=True, kw_only=True)
class Features:
    """Public map of an image to inputs of length 1, channels x places."""

    power: float = 0.25
    """Exponent of the features, which are averages of moduli or of rectified responses: not negative."""
    normalised: bool = False
    """Whether groups of channels are normalised next, record by record."""
    directions: int = 3000
    """Principal directions of the drawn images' features that are kept; 0: no basis, and no mean."""
    exponent: float = 0.35
    """Each is divided by this power of its variance in the drawn images; 0.5: whitening."""
    floor: float = 2.6e-4
    """Added to the variances, as a share of their sum."""
    between: float = 1.0
    """Weight of the covariance of all drawn images, beside that of what differs within pairs."""


def public_inputs(
    parts: list[Tensor], drawn: tuple[Tensor, Tensor] | None, features: Features
) -> list[Tensor]:
    """Inputs from fixed features, each record's by itself.

    Args:
        parts: features of records.
        drawn: those of pairs of drawn images; None: without a basis of theirs.
        features: the map.
    """

    def powers(values: Tensor) -> Tensor:
        raised = values.clamp(min=0) ** features.power
        return normalised(raised) if features.normalised else raised

    if drawn is None:
        return [in_parts(lambda some: unit(powers(some)).flatten(2), part) for part in parts]
    first, second = (powers(values).flatten(1) for values in drawn)
    mean, basis = principal_scaling(first, second, features)
    return [
        in_parts(lambda some: unit((powers(some).flatten(1) - mean) @ basis)[:, :, None], part)
        for part in parts
    ]


def principal_scaling(first: Tensor, second: Tensor, features: Features) -> tuple[Tensor, Tensor]:
    """Mean of the rows of pairs, and principal directions scaled by a power of the variances.

    Args:
        first: a row for each pair.
        second: the other row of each.
        features: weight of either covariance, directions that are kept, exponent and floor.
    """
    mean = (first.mean(0) + second.mean(0)) / 2
    within = (first - second).double()
    covariance = (1 - features.between) / (2 * len(first)) * (within.T @ within)
    for rows in (first, second):
        centred = (rows - mean).double()
        covariance += features.between / (2 * len(first)) * (centred.T @ centred)
    variances, directions = torch.linalg.eigh(covariance)
    kept = variances.flip(0).clamp(min=0)[: features.directions]
    scales = (kept + features.floor * variances.sum()) ** -features.exponent
    return mean, (directions.flip(1)[:, : features.directions] * scales).float()


def in_parts(function: Callable[[Tensor], Tensor], records: Tensor) -> Tensor:
    """A function of records applied to a few of them at a time."""
    return torch.cat([function(some) for some in records.split(_AT_ONCE)])


def unit(values: Tensor) -> Tensor:
    """Each record scaled to length 1; one of zeros stays as it is."""
    lengths: Tensor = torch.linalg.vector_norm(values.flatten(1), dim=1).clamp(
        min=torch.finfo(values.dtype).tiny
    )
    scaled: Tensor = values / lengths.view(-1, *[1] * (values.ndim - 1))
    return scaled
