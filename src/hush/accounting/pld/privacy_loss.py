"""The privacy loss distribution of one subsampled step: both laws' mass between given losses.

A step is a dominating pair: noise on the line, without the record, and that noise shifted by one
with probability `rate`, with the record. The log-likelihood ratio log(1 - rate + rate * shifted /
unshifted) increases with the outcome if the noise is log-concave (docs/guarantees/scalar-noise.md),
so a cut in the loss is a cut in the outcome. Each kind of noise is a `PrivacyLossLaw`. A group of
records has more than one shift: its law is a `MixtureLaw`, with the functions of this file as methods.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np

from hush.accounting.numerics import UNIT as UNIT
from hush.accounting.numerics import Array as Array
from hush.accounting.numerics import log_mixture_ratio_absolute, log_weights

# Cuts per chunk, to bound the memory: a grid may have millions.
_CHUNK = 1 << 16


class PrivacyLossLaw(Protocol):
    """Symmetric log-concave noise and its shift by one; `noise` is in units of `scale`."""

    @property
    def scale(self) -> float: ...

    @property
    def max_privacy_loss(self) -> float:
        """Upper bound on the log-likelihood ratio of the shifted and the unshifted law, or infinity."""

    @property
    def total_variation(self) -> float:
        """Total variation distance between the shifted and the unshifted law."""

    def log_likelihood_ratio(self, noise: Array, shift: float) -> Array:
        """log(shifted / unshifted) at the outcomes `shift + scale * noise`."""

    def invert_ratio(self, ratios: Array) -> tuple[Array, Array]:
        """Where the log-likelihood ratio crosses `ratios`: noise without the record, and with it."""

    def survival(self, noise: Array) -> Array:
        """Mass beyond `noise` >= 0, with relative accuracy."""

    def survival_error(self, noise: Array) -> Array:
        """Relative error of `survival` at noise from `invert_ratio`, in units of `UNIT`."""

    def inverse_survival(self, tail: float) -> float:
        """Noise with mass of about `tail` beyond it, or less."""

    def quadrature(self, tail: float) -> tuple[Array, Array]:
        """Noise out to `inverse_survival(tail)`, and log-weights that approximate the law."""


class Step(Protocol):
    """One subsampled step, its rate and noise: hashable, so that steps can be counted."""

    def __hash__(self) -> int: ...

    @property
    def rate(self) -> float: ...

    @property
    def law(self) -> "PrivacyLossLaw | MixtureLaw": ...

    def with_representable_loss(self) -> "Step":
        """The step, or one with just enough more noise for its losses to fit a grid."""


class Direction(Enum):
    """Direction of the adjacency: the record is in the first law only, or in the second only."""

    REMOVE = "remove"
    ADD = "add"


@dataclass(frozen=True, eq=False)
class CellMasses:
    """Both laws' mass below the first cut, between cuts, and above the last one, by loss.

    `error` bounds the rounding of a mass relative to all the mass at its loss and above.
    """

    first: Array
    second: Array
    error: Array


class MixtureLaw(ABC):
    """Two mixtures of shifts of one noise, sampling included, whose ratio increases with the outcome."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """Scale of the noise."""

    @property
    @abstractmethod
    def max_privacy_loss(self) -> float:
        """Upper bound on the log-likelihood ratio, or infinity."""

    @property
    @abstractmethod
    def total_variation(self) -> float:
        """Upper bound on the total variation distance."""

    @property
    @abstractmethod
    def loss_rounding(self) -> float:
        """Rounding of a loss at a cut, relative to one and the largest loss."""

    @abstractmethod
    def privacy_loss(self, direction: Direction, noise: Array) -> Array:
        """The privacy loss at the outcomes `scale * noise`."""

    @abstractmethod
    def loss_range(self, direction: Direction) -> tuple[float, float]:
        """The smallest and the largest privacy loss, which may be infinite."""

    @abstractmethod
    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        """Losses and log-weights that approximate the privacy loss distribution: an estimate."""

    @abstractmethod
    def loss_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        """Two losses with at most `tail` of the first law's mass outside either."""

    @abstractmethod
    def cell_masses(self, direction: Direction, cuts: Array) -> CellMasses:
        """Both laws' mass between the `cuts`, with relative accuracy in both tails."""


def loss_rounding(step: Step) -> float:
    """The rounding of a step's loss at a cut, relative to one and the largest loss."""
    return step.law.loss_rounding if isinstance(step.law, MixtureLaw) else 32 * UNIT


def total_variation(step: Step) -> float:
    """Upper bound on the total variation distance of one step."""
    if isinstance(step.law, MixtureLaw):
        return step.law.total_variation
    return step.rate * step.law.total_variation


def privacy_loss(step: Step, direction: Direction, noise: Array, shift: float) -> Array:
    """The privacy loss at the outcomes `shift + scale * noise`; `shift` is 0 or 1."""
    if isinstance(step.law, MixtureLaw):
        return step.law.privacy_loss(direction, noise + shift / step.law.scale)
    ratio = log_mixture_ratio_absolute(step.rate, step.law.log_likelihood_ratio(noise, shift))
    return ratio if direction is Direction.REMOVE else -ratio


def loss_range(step: Step, direction: Direction) -> tuple[float, float]:
    """The smallest and the largest privacy loss, which may be infinite."""
    if isinstance(step.law, MixtureLaw):
        return step.law.loss_range(direction)
    ratio = step.law.max_privacy_loss
    low = math.log1p(step.rate * math.expm1(-ratio)) if step.rate < 1 else -ratio
    # exp would overflow where 1 - rate is nothing beside it
    high = ratio + math.log(step.rate) if ratio > 600 else math.log1p(step.rate * math.expm1(ratio))
    return (low, high) if direction is Direction.REMOVE else (-high, -low)


def loss_quadrature(step: Step, direction: Direction, tail: float) -> tuple[Array, Array]:
    """Losses and log-weights that approximate the privacy loss distribution: an estimate."""
    if isinstance(step.law, MixtureLaw):
        return step.law.loss_quadrature(direction, tail)
    noise, weight = step.law.quadrature(tail)
    if direction is Direction.ADD:
        return privacy_loss(step, direction, noise, 0.0), weight
    shifted = privacy_loss(step, direction, noise, 1.0)
    if step.rate == 1:
        return shifted, weight
    log_stay, log_move = log_weights(step.rate)
    weights = np.append(weight + log_stay, weight + log_move)
    return np.append(privacy_loss(step, direction, noise, 0.0), shifted), weights


def loss_quantiles(step: Step, direction: Direction, tail: float) -> tuple[float, float]:
    """Two losses with at most `tail` of the first law's mass outside either."""
    law = step.law
    if isinstance(law, MixtureLaw):
        return law.loss_quantiles(direction, tail)
    unshifted = law.inverse_survival(max(tail / 2, 1e-300))
    shifted = law.inverse_survival(min(0.5, max(tail / 2 / step.rate, 1e-300)))
    top = max(unshifted * law.scale, 1 + shifted * law.scale)
    noise = np.array([-unshifted, top / law.scale])
    low, high = sorted(float(edge) for edge in privacy_loss(step, direction, noise, 0.0))
    return low, high


def cell_masses(step: Step, direction: Direction, cuts: Array) -> CellMasses:
    """Both laws' mass between the `cuts`, with relative accuracy in both tails."""
    if len(cuts) <= _CHUNK:
        return _cell_masses(step, direction, cuts)
    # Neighbouring chunks share a cut: the mass beyond it belongs to the other chunk.
    first, second, error = (np.empty(len(cuts) + 1) for _ in range(3))
    for start in range(0, len(cuts) - 1, _CHUNK):
        stop = min(start + _CHUNK, len(cuts) - 1)
        chunk = _cell_masses(step, direction, cuts[start : stop + 1])
        low, high = int(start > 0), len(chunk.first) - int(stop < len(cuts) - 1)
        for whole, part in ((first, chunk.first), (second, chunk.second), (error, chunk.error)):
            whole[start + low : start + high] = part[low:high]
    return CellMasses(first, second, error)


def _cell_masses(step: Step, direction: Direction, cuts: Array) -> CellMasses:
    if isinstance(step.law, MixtureLaw):
        return step.law.cell_masses(direction, cuts)
    forward = direction is Direction.REMOVE
    ratios = unsampled_ratio(step.rate, cuts if forward else -cuts[::-1])
    without, with_record = step.law.invert_ratio(ratios)
    null = noise_masses(step.law, without)
    mixed = step.rate * noise_masses(step.law, with_record) + (1 - step.rate) * null
    outer = without if forward else -with_record
    rounding = 4 * UNIT * step.law.survival_error(np.maximum(outer, 0.0))
    return by_loss(direction, mixed, null, rounding)


def by_loss(direction: Direction, with_record: Array, without: Array, rounding: Array) -> CellMasses:
    """Both laws' masses between outcomes, in the order of the loss; `rounding` is that at the cuts."""
    # Rounding at both cuts of a cell affects its mass under either law.
    error = np.maximum(np.append(rounding, rounding[-1:]), np.append(rounding[:1], rounding))
    if direction is Direction.REMOVE:
        return CellMasses(with_record, without, error)
    return CellMasses(without[::-1], with_record[::-1], error[::-1])


def unsampled_ratio(rate: float, losses: Array) -> Array:
    """Log-likelihood ratio before subsampling, log((exp(loss) - (1 - rate)) / rate).

    -inf at losses that cannot occur.
    """
    if rate == 1:
        return losses
    growth = np.full(losses.shape, -np.inf)
    large = losses > 1
    growth[large] = losses[large] - math.log(rate) + np.log1p(-(1 - rate) * np.exp(-losses[large]))
    excess = np.expm1(np.where(large, 0.0, losses)) / rate
    small = ~large & (excess > -1)
    growth[small] = np.log1p(excess[small])
    return growth


def noise_masses(law: PrivacyLossLaw, cuts: Array) -> Array:
    """Masses of symmetric noise below, between and above increasing `cuts`."""
    tail = law.survival(np.abs(cuts))
    positive = cuts > 0
    masses = np.empty(len(cuts) + 1)
    masses[0] = 1 - tail[0] if positive[0] else tail[0]
    masses[-1] = tail[-1] if positive[-1] else 1 - tail[-1]
    masses[1:-1] = np.where(
        positive[:-1],
        tail[:-1] - tail[1:],
        np.where(positive[1:], 1 - tail[:-1] - tail[1:], tail[1:] - tail[:-1]),
    )
    # Rounding may have left less than nothing in a narrow cell.
    return np.maximum(masses, 0.0)
