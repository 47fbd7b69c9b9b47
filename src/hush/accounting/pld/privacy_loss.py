"""The privacy loss of one step, cut at given losses: how much mass of each law lies between cuts.

A step is a pair of laws, with the record and without it: noise on the line, and that noise moved
by one with probability `rate`. Their log-ratio log(1 - rate + rate * shifted / unshifted) grows
with the outcome if the noise is log-concave (docs/guarantees/scalar-noise.md), so a cut in the
loss is a cut in the outcome. What differs between kinds of noise is a `Law`.
"""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

UNIT = float(np.finfo(float).eps) / 2
_SMALL = 1e-8
# Cuts that are worked on at a time, to bound the memory: a grid may have millions.
_AT_ONCE = 1 << 16


class PrivacyLossLaw(Protocol):
    """Symmetric log-concave noise that a record moves by one; `noise` is in units of `scale`."""

    @property
    def scale(self) -> float: ...

    @property
    def most(self) -> float:
        """No less than the log-ratio of the moved and the unmoved law anywhere; may be infinite."""

    @property
    def distance(self) -> float:
        """The total variation distance between the two."""

    def ratio(self, noise: Array, shift: float) -> Array:
        """Their log-ratio at the outcomes `shift + scale * noise`."""

    def cuts(self, ratios: Array) -> tuple[Array, Array]:
        """Where the log-ratio crosses `ratios`: the noise without the record, and with it."""

    def tail(self, noise: Array) -> Array:
        """The mass beyond `noise` >= 0, with relative accuracy."""

    def rounding(self, noise: Array) -> Array:
        """The relative error of `tail` at a noise that `cuts` gave, in units of `UNIT`."""

    def far(self, tail: float) -> float:
        """A noise with about `tail` beyond it, or less."""

    def nodes(self, tail: float) -> tuple[Array, Array]:
        """Some noise out to `far(tail)`, and the logarithms of weights that stand for the law."""


class Step(Protocol):
    """A sampling rate and the noise: a value, so that it can be a key."""

    def __hash__(self) -> int: ...

    @property
    def rate(self) -> float: ...

    @property
    def law(self) -> PrivacyLossLaw: ...

    def noisier(self) -> "Step":
        """The step, or one with just enough more noise for its losses to fit a grid."""


class Direction(Enum):
    """Whether the first law is the one with the record (removed in the second) or without it."""

    REMOVE = "remove"
    ADD = "add"


@dataclass(frozen=True, eq=False)
class CellMasses:
    """Masses below the first cut, between cuts, and above the last one, in order of the loss.

    `error` bounds the rounding of a mass relative to all the mass at its loss and above.
    """

    first: Array
    second: Array
    error: Array


def privacy_loss(step: Step, direction: Direction, noise: Array, shift: float) -> Array:
    """The privacy loss at the outcomes `shift + scale * noise`; `shift` is 0 or 1."""
    ratio = step.law.ratio(noise, shift)
    if step.rate < 1:
        small = np.log1p(step.rate * np.expm1(np.minimum(ratio, _SMALL)))
        large = np.logaddexp(math.log1p(-step.rate), math.log(step.rate) + ratio)
        # The sum of logarithms is never off by less than a unit, however small the loss.
        ratio = np.where(np.abs(ratio) < _SMALL, small, large)
    return ratio if direction is Direction.REMOVE else -ratio


def loss_range(step: Step, direction: Direction) -> tuple[float, float]:
    """The least and the greatest loss: those at the law's extreme log-ratios, infinite or not."""
    ratio = step.law.most
    low = math.log1p(step.rate * math.expm1(-ratio)) if step.rate < 1 else -ratio
    # exp would overflow where 1 - rate is nothing beside it
    high = ratio + math.log(step.rate) if ratio > 600 else math.log1p(step.rate * math.expm1(ratio))
    return (low, high) if direction is Direction.REMOVE else (-high, -low)


def nodes(step: Step, direction: Direction, tail: float) -> tuple[Array, Array]:
    """Some losses, and the logarithms of weights that stand for their first law: an estimate."""
    noise, weight = step.law.nodes(tail)
    if direction is Direction.ADD:
        return privacy_loss(step, direction, noise, 0.0), weight
    moved = privacy_loss(step, direction, noise, 1.0)
    if step.rate == 1:
        return moved, weight
    weights = weight + math.log1p(-step.rate), weight + math.log(step.rate)
    return np.append(privacy_loss(step, direction, noise, 0.0), moved), np.append(*weights)


def reach(step: Step, direction: Direction, tail: float) -> tuple[float, float]:
    """Two losses with at most `tail` of the first law's mass outside either."""
    law = step.law
    far = law.far(max(tail / 2, 1e-300))
    near = law.far(min(0.5, max(tail / 2 / step.rate, 1e-300)))
    top = max(far * law.scale, 1 + near * law.scale)
    noise = np.array([-far, top / law.scale])
    low, high = sorted(float(edge) for edge in privacy_loss(step, direction, noise, 0.0))
    return low, high


def cell_masses(step: Step, direction: Direction, cuts: Array) -> CellMasses:
    """The masses of both laws between the `cuts`, with relative accuracy in both tails."""
    if len(cuts) <= _AT_ONCE:
        return _cells(step, direction, cuts)
    # Neighbouring parts share a cut: what is beyond it belongs to the other part.
    first, second, error = (np.empty(len(cuts) + 1) for _ in range(3))
    for start in range(0, len(cuts) - 1, _AT_ONCE):
        stop = min(start + _AT_ONCE, len(cuts) - 1)
        part = _cells(step, direction, cuts[start : stop + 1])
        low, high = int(start > 0), len(part.first) - int(stop < len(cuts) - 1)
        for whole, some in ((first, part.first), (second, part.second), (error, part.error)):
            whole[start + low : start + high] = some[low:high]
    return CellMasses(first, second, error)


def _cells(step: Step, direction: Direction, cuts: Array) -> CellMasses:
    forward = direction is Direction.REMOVE
    without, with_record = step.law.cuts(_log_growth(step.rate, cuts if forward else -cuts[::-1]))
    null = _masses(step.law, without)
    mixed = step.rate * _masses(step.law, with_record) + (1 - step.rate) * null
    # A mass between two cuts, and its twin of the other law, suffer rounding at both.
    far = without if forward else -with_record
    rounding = 4 * UNIT * step.law.rounding(np.maximum(far, 0.0))
    error = np.maximum(np.append(rounding, rounding[-1:]), np.append(rounding[:1], rounding))
    if forward:
        return CellMasses(mixed, null, error)
    return CellMasses(null[::-1], mixed[::-1], error[::-1])


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


def _masses(law: PrivacyLossLaw, cuts: Array) -> Array:
    """The masses of symmetric noise below, between and above increasing `cuts`."""
    tail = law.tail(np.abs(cuts))
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
