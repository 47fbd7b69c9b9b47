"""The privacy loss distribution of one subsampled step: both laws' mass between given losses.

A step is a dominating pair: two laws on the line whose log-likelihood ratio increases with the outcome,
so a cut in the loss is a cut in the outcome. `SampledLaw` is noise on the line, without the record,
against that noise shifted by one with probability `rate`, with the record. Its ratio log(1 - rate + rate
* shifted / unshifted) increases if the noise is log-concave (docs/guarantees/scalar-noise.md).
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


class NoiseLaw(Protocol):
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


class PrivacyLossLaw(ABC):
    """Two laws on the line, sampling included, whose likelihood ratio increases with the outcome."""

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
    def _cell_masses(self, direction: Direction, cuts: Array) -> CellMasses:
        """`cell_masses` at a limited number of cuts."""

    def cell_masses(self, direction: Direction, cuts: Array) -> CellMasses:
        """Both laws' mass between the `cuts`, with relative accuracy in both tails."""
        if len(cuts) <= _CHUNK:
            return self._cell_masses(direction, cuts)
        # Neighbouring chunks share a cut: the mass beyond it belongs to the other chunk.
        first, second, error = (np.empty(len(cuts) + 1) for _ in range(3))
        for start in range(0, len(cuts) - 1, _CHUNK):
            stop = min(start + _CHUNK, len(cuts) - 1)
            chunk = self._cell_masses(direction, cuts[start : stop + 1])
            low, high = int(start > 0), len(chunk.first) - int(stop < len(cuts) - 1)
            for whole, part in ((first, chunk.first), (second, chunk.second), (error, chunk.error)):
                whole[start + low : start + high] = part[low:high]
        return CellMasses(first, second, error)


@dataclass(frozen=True)
class SampledLaw(PrivacyLossLaw):
    """Noise against the mixture of itself and its shift by one, of weight `rate`."""

    noise: NoiseLaw
    rate: float

    @property
    def scale(self) -> float:
        return self.noise.scale

    @property
    def max_privacy_loss(self) -> float:
        return self.noise.max_privacy_loss

    @property
    def total_variation(self) -> float:
        return self.rate * self.noise.total_variation

    @property
    def loss_rounding(self) -> float:
        return 32 * UNIT

    def privacy_loss(self, direction: Direction, noise: Array) -> Array:
        return self._shifted_loss(direction, noise, 0.0)

    def _shifted_loss(self, direction: Direction, noise: Array, shift: float) -> Array:
        """The privacy loss at the outcomes `shift + scale * noise`; `shift` is 0 or 1."""
        ratio = log_mixture_ratio_absolute(self.rate, self.noise.log_likelihood_ratio(noise, shift))
        return ratio if direction is Direction.REMOVE else -ratio

    def loss_range(self, direction: Direction) -> tuple[float, float]:
        rate, ratio = self.rate, self.noise.max_privacy_loss
        low = math.log1p(rate * math.expm1(-ratio)) if rate < 1 else -ratio
        # exp would overflow where 1 - rate is negligible beside it
        high = ratio + math.log(rate) if ratio > 600 else math.log1p(rate * math.expm1(ratio))
        return (low, high) if direction is Direction.REMOVE else (-high, -low)

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        noise, weight = self.noise.quadrature(tail)
        if direction is Direction.ADD:
            return self.privacy_loss(direction, noise), weight
        shifted = self._shifted_loss(direction, noise, 1.0)
        if self.rate == 1:
            return shifted, weight
        log_stay, log_move = log_weights(self.rate)
        weights = np.append(weight + log_stay, weight + log_move)
        return np.append(self.privacy_loss(direction, noise), shifted), weights

    def loss_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        law = self.noise
        unshifted = law.inverse_survival(max(tail / 2, 1e-300))
        shifted = law.inverse_survival(min(0.5, max(tail / 2 / self.rate, 1e-300)))
        top = max(unshifted * law.scale, 1 + shifted * law.scale)
        noise = np.array([-unshifted, top / law.scale])
        low, high = sorted(float(edge) for edge in self.privacy_loss(direction, noise))
        return low, high

    def _cell_masses(self, direction: Direction, cuts: Array) -> CellMasses:
        forward = direction is Direction.REMOVE
        ratios = unsampled_ratio(self.rate, cuts if forward else -cuts[::-1])
        without, with_record = self.noise.invert_ratio(ratios)
        null = noise_masses(self.noise, without)
        mixed = self.rate * noise_masses(self.noise, with_record) + (1 - self.rate) * null
        outer = without if forward else -with_record
        rounding = 4 * UNIT * self.noise.survival_error(np.maximum(outer, 0.0))
        return by_loss(direction, mixed, null, rounding)


class Step(Protocol):
    """One step with a dominating pair: hashable, so that steps can be counted."""

    def __hash__(self) -> int: ...

    @property
    def law(self) -> PrivacyLossLaw: ...

    def with_representable_loss(self) -> "Step":
        """The step, or one with just enough more noise for its losses to fit a grid."""


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


def noise_masses(law: NoiseLaw, cuts: Array) -> Array:
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
