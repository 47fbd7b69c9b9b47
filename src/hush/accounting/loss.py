"""The privacy loss of one step, cut at given losses: how much mass of each law lies between cuts.

A step is a pair of laws, with the record and without it. On the line (docs/guarantees/
poisson-gaussian.md) they are N(0, s^2) and (1-q) N(0, s^2) + q N(1, s^2), whose log-ratio
log(1 - q + q exp((2x - 1) / 2 s^2)) grows with x; so a cut in the loss is a cut in x.
"""

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri

from hush.accounting.mechanism import SampledGaussian

Array = npt.NDArray[np.float64]

UNIT = float(np.finfo(float).eps) / 2


class Direction(Enum):
    """Whether the first law is the one with the record (removed in the second) or without it."""

    REMOVE = "remove"
    ADD = "add"


@dataclass(frozen=True, eq=False)
class Cells:
    """Masses below the first cut, between cuts, and above the last one, in order of the loss.

    `error` bounds the rounding of a mass relative to all the mass at its loss and above.
    """

    first: Array
    second: Array
    error: Array


def loss(step: SampledGaussian, direction: Direction, noise: Array, shift: float) -> Array:
    """The privacy loss at the outcomes `shift + multiplier * noise`; `shift` is 0 or 1."""
    exponent = (noise + (shift - 0.5) / step.multiplier) / step.multiplier
    if step.rate < 1:
        exponent = np.logaddexp(math.log1p(-step.rate), math.log(step.rate) + exponent)
    return exponent if direction is Direction.REMOVE else -exponent


def reach(step: SampledGaussian, direction: Direction, tail: float) -> tuple[float, float]:
    """Two losses with at most `tail` of the first law's mass outside either."""
    far = -float(ndtri(max(tail / 2, 1e-300)))
    top = max(
        far * step.multiplier,
        1 - float(ndtri(min(0.5, max(tail / 2 / step.rate, 1e-300)))) * step.multiplier,
    )
    noise = np.array([-far, top / step.multiplier])
    low, high = sorted(float(edge) for edge in loss(step, direction, noise, 0.0))
    return low, high


def cells(step: SampledGaussian, direction: Direction, cuts: Array) -> Cells:
    """The masses of both laws between the `cuts`, with relative accuracy in both tails."""
    forward = direction is Direction.REMOVE
    spread = step.multiplier * _log_growth(step.rate, cuts if forward else -cuts[::-1])
    without = spread + 0.5 / step.multiplier
    with_record = spread - 0.5 / step.multiplier
    null = _normal_masses(without)
    mixed = step.rate * _normal_masses(with_record) + (1 - step.rate) * null
    # Measured against 40 digits: ndtr is off by at most (5 + 2 x^2) units on -37 < x < 0. A mass
    # between two cuts, and its twin of the other law, suffer that at both.
    far = np.clip(without if forward else -with_record, 0.0, 38.0)
    error = 4 * UNIT * (5 + 2 * np.append(far, far[-1:]) ** 2)
    if forward:
        return Cells(mixed, null, error)
    return Cells(null[::-1], mixed[::-1], error[::-1])


def _log_growth(rate: float, losses: Array) -> Array:
    """log((exp(loss) - (1 - rate)) / rate): -inf at losses that cannot occur."""
    if rate == 1:
        return losses
    growth = np.full(losses.shape, -np.inf)
    large = losses > 1
    growth[large] = losses[large] - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-losses[large]))
    excess = np.expm1(np.where(large, 0.0, losses)) / rate
    small = ~large & (excess > -1)
    growth[small] = np.log1p(excess[small])
    return growth


def _normal_masses(cuts: Array) -> Array:
    """The standard normal masses below, between and above increasing `cuts`."""
    tail = ndtr(-np.abs(cuts))
    positive = cuts > 0
    masses = np.empty(len(cuts) + 1)
    masses[0] = 1 - tail[0] if positive[0] else tail[0]
    masses[-1] = tail[-1] if positive[-1] else 1 - tail[-1]
    masses[1:-1] = np.where(
        positive[:-1],
        tail[:-1] - tail[1:],
        np.where(positive[1:], 1 - tail[:-1] - tail[1:], tail[1:] - tail[:-1]),
    )
    return masses
