"""Privacy loss distributions of one step: probabilities of intervals of losses.

A step is a dominating pair: two distributions on the real line whose log-likelihood ratio increases with
the outcome. An interval of losses is therefore an interval of outcomes. In the direction `REMOVE`, the
first distribution is with the record; in the direction `ADD`, it is without the record.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from typing import Self

import numpy as np

from hush.accounting.numerics import UNIT, Array, log_mixture_ratio_absolute, log_weights
from hush.accounting.pld.laws import MAX_POWER, GaussianLaw, GeneralizedGaussianLaw

# Number of cuts per chunk, to limit memory.
_CHUNK = 1 << 16

NoiseLaw = GaussianLaw | GeneralizedGaussianLaw


class Direction(Enum):
    """Direction of the adjacency: the record is only in the first data set (REMOVE), or only in the
    second (ADD)."""

    REMOVE = "remove"
    ADD = "add"


@dataclass(frozen=True, eq=False)
class CellMasses:
    """Probabilities of losses below the first cut, between cuts, and above the last cut.

    `first` and `second` are for the two distributions. `error` bounds the rounding error of a
    probability, relative to the survival function at its loss.
    """

    first: Array
    second: Array
    error: Array


class Step(ABC):
    """Dominating pair of a step, including sampling, with an increasing likelihood ratio."""

    centre = 0.0
    """Outcome near the mode of the distribution without the record."""

    def with_representable_loss(self) -> Self:
        """Step with losses that can be represented on a grid, by adding noise if necessary."""
        return self

    @property
    @abstractmethod
    def total_variation(self) -> float:
        """Upper bound on the total variation distance."""

    @property
    def loss_rounding(self) -> float:
        """Rounding error of the loss at a cut, relative to 1 + the largest loss."""
        return 32 * UNIT

    @property
    @abstractmethod
    def ratio_range(self) -> tuple[float, float]:
        """Smallest and largest log-likelihood ratio, which may be infinite."""

    @abstractmethod
    def log_ratio(self, outcomes: Array) -> Array:
        """Log-likelihood ratio (with / without the record) at `outcomes` in units of the noise."""

    @abstractmethod
    def outcome_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        """Outcomes that correspond to `loss_quantiles`."""

    @abstractmethod
    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        """Losses and log-weights that approximate the privacy loss distribution; not a bound."""

    @abstractmethod
    def _outcome_masses(self, direction: Direction, ratios: Array) -> tuple[Array, Array, Array]:
        """Probabilities with and without the record between increasing ratios, and rounding errors."""

    def privacy_loss(self, direction: Direction, outcomes: Array) -> Array:
        """Privacy loss at `outcomes`."""
        ratio = self.log_ratio(outcomes)
        return ratio if direction is Direction.REMOVE else -ratio

    def loss_range(self, direction: Direction) -> tuple[float, float]:
        """Smallest and largest privacy loss, which may be infinite."""
        low, high = self.ratio_range
        return (low, high) if direction is Direction.REMOVE else (-high, -low)

    def loss_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        """Lower and upper quantile of the finite losses: each tail has probability at most `tail`."""
        ends = np.array(self.outcome_quantiles(direction, tail))
        low, high = sorted(self.privacy_loss(direction, ends).tolist())
        return low, high

    def cell_masses(self, direction: Direction, cuts: Array) -> CellMasses:
        """Probabilities of losses between the `cuts`, with relative accuracy in both tails."""
        # Neighbouring chunks share a cut; the probability beyond it belongs to the other chunk.
        first, second, error = (np.empty(len(cuts) + 1) for _ in range(3))
        for start in range(0, max(len(cuts) - 1, 1), _CHUNK):
            stop = min(start + _CHUNK, len(cuts) - 1)
            chunk, forward = cuts[start : stop + 1], direction is Direction.REMOVE
            with_record, without, rounding = self._outcome_masses(
                direction, chunk if forward else -chunk[::-1]
            )
            # Rounding errors at both cuts of a cell affect its probabilities.
            errors = np.maximum(np.append(rounding, rounding[-1:]), np.append(rounding[:1], rounding))
            parts = (with_record, without, errors)
            if not forward:
                parts = (without[::-1], with_record[::-1], errors[::-1])
            low, high = int(start > 0), len(errors) - int(stop < len(cuts) - 1)
            for whole, part in zip((first, second, error), parts, strict=True):
                whole[start + low : start + high] = part[low:high]
        return CellMasses(first, second, error)


@dataclass(frozen=True)
class SampledPair(Step):
    """Noise, and the mixture of the noise with its shift by one, with weight `rate`.

    The noise is log-concave, so the ratio log(1 - rate + rate * shifted / unshifted) increases with the
    outcome (docs/guarantees/scalar-noise.md).
    """

    rate: float

    @property
    @abstractmethod
    def noise(self) -> NoiseLaw:
        """Noise distribution, in units of the sensitivity."""

    @abstractmethod
    def with_scale(self, scale: float) -> Self:
        """The step with noise of this scale."""

    @property
    def total_variation(self) -> float:
        return self.rate * self.noise.total_variation

    @property
    def ratio_range(self) -> tuple[float, float]:
        return _sampled_range(self.noise, self.rate)

    def log_ratio(self, outcomes: Array, shift: float = 0.0) -> Array:
        return log_mixture_ratio_absolute(self.rate, self.noise.log_likelihood_ratio(outcomes, shift))

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        noise, weight = self.noise.quadrature(tail)
        if direction is Direction.ADD:
            return self.privacy_loss(direction, noise), weight
        shifted = self.log_ratio(noise, 1.0)
        if self.rate == 1:
            return shifted, weight
        log_stay, log_move = log_weights(self.rate)
        weights = np.append(weight + log_stay, weight + log_move)
        return np.append(self.log_ratio(noise), shifted), weights

    def outcome_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        law = self.noise
        unshifted = law.inverse_survival(max(tail / 2, 1e-300))
        shifted = law.inverse_survival(min(0.5, max(tail / 2 / self.rate, 1e-300)))
        top = max(unshifted * law.scale, 1 + shifted * law.scale)
        return -unshifted, top / law.scale

    def _outcome_masses(self, direction: Direction, ratios: Array) -> tuple[Array, Array, Array]:
        without, with_record = self.noise.invert_ratio(unsampled_ratio(self.rate, ratios))
        null = noise_masses(self.noise, without)
        mixed = self.rate * noise_masses(self.noise, with_record) + (1 - self.rate) * null
        outer = without if direction is Direction.REMOVE else -with_record
        return mixed, null, 4 * UNIT * self.noise.survival_error(np.maximum(outer, 0.0))


def _sampled_range(noise: NoiseLaw, rate: float) -> tuple[float, float]:
    """Range of the log-likelihood ratio of a sampled record."""
    ratio = noise.max_privacy_loss
    # 1 - rate is negligible here, and exp would overflow
    high = ratio + math.log(rate) if ratio > 600 else math.log1p(rate * math.expm1(ratio))
    return math.log1p(rate * math.expm1(-ratio)) if rate < 1 else -ratio, high


def unsampled_ratio(rate: float, losses: Array) -> Array:
    """Log-likelihood ratio without subsampling: log((exp(loss) - (1 - rate)) / rate).

    It is -inf for losses that cannot occur.
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
    """Probabilities of symmetric noise below, between and above increasing `cuts`."""
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
    # rounding may make the probability of a narrow cell negative
    return np.maximum(masses, 0.0)


def mixture_quantiles(
    parts: Sequence[tuple[float, float]], reach: Callable[[float], float], tail: float
) -> tuple[float, float]:
    """Two outcomes such that a mixture is outside with probability at most `tail`.

    Args:
        parts: Mean and weight of each component.
        reach: Function from a tail probability of a component to its distance from the mean.
        tail: Probability outside the interval.
    """
    edges = []
    for place, share in parts:
        part = max(tail / (2 * len(parts)) / share, 1e-300)
        if part < 0.5:
            edges += [place - reach(part), place + reach(part)]
    return min(edges), max(edges)


_GROUP_TABLE_SIZE = 1 << 14
_MAX_SECANTS = 12
# Number of mixture terms in memory at a time.
_MAX_TERMS = 1 << 21
# The smallest positive double.
_NO_MASS = 5e-324


@dataclass(frozen=True)
class GroupLaw(Step):
    """Binomial mixture of `noise` shifted by 0 to `size`, and the noise or the reflected mixture.

    One record shifts `noise` by at most 1.
    """

    noise: NoiseLaw
    rate: float
    size: int
    replaced: bool
    """Whether the records are replaced in the other data set, instead of removed."""

    def with_representable_loss(self) -> Self:
        # the shift by all records causes the largest losses
        shift = 2 * self.size if self.replaced else self.size
        scaled = self._noise_of(shift)
        if scaled.scale >= scaled.min_scale:
            return self
        return replace(self, noise=replace(self.noise, scale=scaled.min_scale / (1 / shift)))

    @property
    def total_variation(self) -> float:
        # couple the numbers of sampled records; total variation is jointly convex
        return sum(
            weight * self._noise_of(2 * k if self.replaced else k).total_variation
            for k, weight in _binomial_weights(self.size, self.rate)
            if k
        )

    @property
    def loss_rounding(self) -> float:
        # docs/guarantees/groups.md, step 6
        power = self.noise.beta if isinstance(self.noise, GeneralizedGaussianLaw) else 2.0
        least = min(weight for _, weight in _binomial_weights(self.size, self.rate))
        return 8 * UNIT * power * (MAX_POWER - math.log(least))

    @property
    def ratio_range(self) -> tuple[float, float]:
        # multiples of the range for one record
        low, high = (self.size * end for end in _sampled_range(self.noise, self.rate))
        return (low - high, high - low) if self.replaced else (low, high)

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        noise, weight = self.noise.quadrature(tail)
        # omit components with a weight far below the tail
        parts = [(shift, share) for shift, share in self._components(direction) if share > 1e-3 * tail]
        losses = [self.privacy_loss(direction, noise + shift / self.noise.scale) for shift, _ in parts]
        return np.concatenate(losses), np.concatenate([weight + math.log(share) for _, share in parts])

    def outcome_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        parts = [(shift / self.noise.scale, share) for shift, share in self._components(direction)]
        return mixture_quantiles(parts, self.noise.inverse_survival, tail)

    def loss_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        low, high = super().loss_quantiles(direction, tail)
        # Laplace noise has an atom at its largest loss, which must not be rounded to above the grid
        rounding = 2 * self.loss_rounding * (1 + max(abs(low), abs(high)))
        return low - rounding, high + rounding

    def _outcome_masses(self, direction: Direction, ratios: Array) -> tuple[Array, Array, Array]:
        outcomes, scale = self._invert_ratio(ratios), self.noise.scale
        with_records, without = (
            np.asarray(
                sum(share * noise_masses(self.noise, (outcomes - shift) / scale) for shift, share in law)
            )
            for law in (self._components(Direction.REMOVE), self._components(Direction.ADD))
        )
        # The components farthest from a cut have the smallest tails and the largest errors. The error
        # includes the tail, its argument, the weights and the sum.
        forward = direction is Direction.REMOVE
        farthest = outcomes + self.size * self.replaced if forward else self.size - outcomes
        survival_error = self.noise.survival_error(np.maximum(farthest / scale, 0.0))
        shares = len(_binomial_weights(self.size, self.rate))
        return with_records, without, 4 * UNIT * (2 * survival_error + shares + 8)

    def _components(self, direction: Direction) -> Sequence[tuple[int, float]]:
        """Shifts and weights of the first distribution in a direction."""
        weights = _binomial_weights(self.size, self.rate)
        if direction is Direction.REMOVE:
            return weights
        return [(-k, weight) for k, weight in weights] if self.replaced else [(0, 1.0)]

    def _noise_of(self, shift: int) -> NoiseLaw:
        """Noise in units of `shift`."""
        return replace(self.noise, scale=self.noise.scale / shift)

    def log_ratio(self, outcomes: Array) -> Array:
        ratio = self._log_mixture(outcomes)
        return ratio - self._log_mixture(-outcomes) if self.replaced else ratio

    def _log_mixture(self, noise: Array) -> Array:
        """log sum_k weight_k shifted_k / unshifted."""
        weights = _binomial_weights(self.size, self.rate)
        if len(noise) > (chunk := _MAX_TERMS // len(weights)):
            parts = (noise[start : start + chunk] for start in range(0, len(noise), chunk))
            return np.concatenate([self._log_mixture(part) for part in parts])
        top = np.full(len(noise), -np.inf)
        terms = []
        for k, weight in weights:
            # the ratio may overflow for very small noise
            with np.errstate(over="ignore"):
                ratios = self._noise_of(k).log_likelihood_ratio(noise, 0.0) if k else 0 * noise
            terms.append(ratios + math.log(weight))
            np.maximum(top, terms[-1], out=top)
        np.minimum(top, sys.float_info.max, out=top)
        total = np.zeros(len(noise))
        for term in terms:
            term -= top
            total += np.exp(np.minimum(term, 0.0, out=term), out=term)
        top += np.log(total)
        return top

    def _invert_ratio(self, losses: Array) -> Array:
        """Outcomes with log-likelihood ratios `losses`; infinite outside the range of ratios."""
        table, values = _ratio_table(self)
        after = np.searchsorted(values, losses)
        outcomes = np.where(after == 0, -np.inf, np.inf)
        inside = np.flatnonzero((after > 0) & (after < len(values)))
        after, target = after[inside], losses[inside]
        low, high = table[after - 1], table[after]
        tolerance = self.loss_rounding / 4 * (1 + np.abs(target))
        last, last_error = low, values[after - 1] - target
        outcome, error = high, values[after] - target
        # secant method, with bisection if it leaves the bracket or does not converge
        turn = 0
        while len(inside):
            with np.errstate(divide="ignore", invalid="ignore"):
                secant = outcome - error * (outcome - last) / (error - last_error)
            usable = (low < secant) & (secant < high) & (turn < _MAX_SECANTS)
            last, last_error = outcome, error
            outcome = np.where(usable, secant, (low + high) / 2)
            error = self.log_ratio(outcome / self.noise.scale) - target
            outcomes[inside] = outcome
            low, high = np.where(error < 0, outcome, low), np.where(error < 0, high, outcome)
            middle = (low + high) / 2
            # stop if no double lies between the ends
            rest = (np.abs(error) > tolerance) & (low < middle) & (middle < high)
            inside, turn = inside[rest], turn + 1
            target, tolerance, low, high, last, last_error, outcome, error = (
                each[rest] for each in (target, tolerance, low, high, last, last_error, outcome, error)
            )
        # rounding must not change the order of cuts
        return np.maximum.accumulate(outcomes)


@lru_cache(maxsize=16)
def _binomial_weights(size: int, rate: float) -> tuple[tuple[int, float], ...]:
    """Binomial probabilities, correctly rounded, without those that underflow."""
    drawn, outcomes = rate.as_integer_ratio()
    chances = (
        (k, math.comb(size, k) * drawn**k * (outcomes - drawn) ** (size - k) / outcomes**size)
        for k in range(size + 1)
    )
    return tuple((k, chance) for k, chance in chances if chance > 0)


@lru_cache(maxsize=4)
def _ratio_table(law: GroupLaw) -> tuple[Array, Array]:
    """Increasing outcomes over the whole range of the noise, and their log-likelihood ratios."""
    # A bounded ratio is constant beyond the shifts.
    bounded = law.noise.max_privacy_loss < math.inf
    reach = 0.0 if bounded else law.noise.inverse_survival(_NO_MASS) * law.noise.scale
    table = np.linspace(-law.size * law.replaced - reach, law.size + reach, _GROUP_TABLE_SIZE)
    return table, np.maximum.accumulate(law.log_ratio(table / law.noise.scale))
