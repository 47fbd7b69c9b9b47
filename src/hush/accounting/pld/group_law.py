"""Privacy loss law of a group: records whose slots change together, each drawn on its own.

Of m records a binomial number is drawn, and k drawn ones shift the outcome by k at most. The dominating
pair (docs/guarantees/groups.md) is that mixture of shifts against no shift where the m slots are
emptied, and against its mirror image where the m records are replaced. The log-likelihood ratio rises
with the outcome in both, so a cut in the loss is a cut in the outcome.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from hush.accounting.pld.laws import MAX_POWER, GaussianLaw, GeneralizedGaussianLaw
from hush.accounting.pld.privacy_loss import (
    UNIT,
    Array,
    CellMasses,
    Direction,
    MixtureLaw,
    by_loss,
    noise_masses,
)

_TABLE_SIZE = 1 << 14
_MAX_SECANTS = 12
# Terms of mixtures that are held at a time, to bound the memory.
_CHUNK = 1 << 21
# No mass lies beyond noise of this tail, the smallest double.
_NO_MASS = 5e-324


@dataclass(frozen=True)
class GroupLaw(MixtureLaw):
    """Mixture of shifts k = 0..size of `noise`, binomial with `rate`, against none or its mirror image.

    Args:
        noise: Noise that one record shifts by one at most.
        rate: Chance that a record is drawn.
        size: Number of records.
        replaced: Whether each has another record in its place in the other data set, or none.
    """

    noise: GaussianLaw | GeneralizedGaussianLaw
    rate: float
    size: int
    replaced: bool

    @property
    def scale(self) -> float:
        return self.noise.scale

    @property
    def max_privacy_loss(self) -> float:
        return self.loss_range(Direction.REMOVE)[1]

    @property
    def total_variation(self) -> float:
        # the numbers drawn in the two data sets are coupled: total variation is jointly convex
        return sum(
            weight * self._noise_of(2 * k if self.replaced else k).total_variation
            for k, weight in self._weights
            if k
        )

    @property
    def loss_rounding(self) -> float:
        # docs/guarantees/groups.md, step 6
        power = self.noise.beta if isinstance(self.noise, GeneralizedGaussianLaw) else 2.0
        least = min(weight for _, weight in self._weights)
        return 8 * UNIT * power * (MAX_POWER - math.log(least))

    def privacy_loss(self, direction: Direction, noise: Array) -> Array:
        ratio = self._log_ratio(noise)
        return ratio if direction is Direction.REMOVE else -ratio

    def loss_range(self, direction: Direction) -> tuple[float, float]:
        """`size` times the range of one record: the ratio's ends are powers of that record's."""
        ratio = self.noise.max_privacy_loss
        low = self.size * math.log1p(self.rate * math.expm1(-ratio))
        if ratio > 600:
            high = self.size * (ratio + math.log(self.rate))
        else:
            high = self.size * math.log1p(self.rate * math.expm1(ratio))
        if self.replaced:
            low, high = low - high, high - low
        return (low, high) if direction is Direction.REMOVE else (-high, -low)

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        noise, weight = self.noise.quadrature(tail)
        # components lighter than the tail lie beyond the grid
        parts = [(shift, share) for shift, share in self._components(direction) if share > 1e-3 * tail]
        losses = [self.privacy_loss(direction, noise + shift / self.scale) for shift, _ in parts]
        return np.concatenate(losses), np.concatenate([weight + math.log(share) for _, share in parts])

    def loss_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        parts = list(self._components(direction))
        edges = []
        for shift, share in parts:
            part = max(tail / (2 * len(parts)) / share, 1e-300)
            if part < 0.5:
                reach = self.noise.inverse_survival(part)
                edges += [shift / self.scale - reach, shift / self.scale + reach]
        ends = np.array([min(edges), max(edges)])
        low, high = sorted(float(edge) for edge in self.privacy_loss(direction, ends))
        return low, high

    def cell_masses(self, direction: Direction, cuts: Array) -> CellMasses:
        forward = direction is Direction.REMOVE
        outcomes = self._invert_ratio(cuts if forward else -cuts[::-1])
        with_records, without = (
            np.asarray(sum(share * self._masses(outcomes - shift) for shift, share in law))
            for law in (self._components(Direction.REMOVE), self._components(Direction.ADD))
        )
        # The components farthest from a cut have its smallest tails, and the largest errors: those of
        # the tail, of its argument (no more), of the shares and of their sum.
        farthest = outcomes + self._mirrored if forward else self.size - outcomes
        survival_error = self.noise.survival_error(np.maximum(farthest / self.scale, 0.0))
        rounding = 4 * UNIT * (2 * survival_error + len(self._weights) + 8)
        return by_loss(direction, with_records, without, rounding)

    def _masses(self, cuts: Array) -> Array:
        return noise_masses(self.noise, cuts / self.scale)

    @property
    def _mirrored(self) -> int:
        """The largest shift of the second law, which is to the other side."""
        return self.size if self.replaced else 0

    @property
    def _weights(self) -> tuple[tuple[int, float], ...]:
        return _binomial_weights(self.size, self.rate)

    def _components(self, direction: Direction) -> Iterator[tuple[int, float]]:
        """Shifts and weights of a direction's first law."""
        if direction is Direction.REMOVE:
            yield from self._weights
        elif self.replaced:
            yield from ((-k, weight) for k, weight in self._weights)
        else:
            yield 0, 1.0

    def _noise_of(self, shift: int) -> GaussianLaw | GeneralizedGaussianLaw:
        """The noise in units of `shift`: what the shift is to it, one is to this."""
        return replace(self.noise, scale=self.scale / shift)

    def _log_ratio(self, noise: Array) -> Array:
        """log(first law / second law) at the outcomes `scale * noise`."""
        ratio = self._log_mixture(noise)
        return ratio - self._log_mixture(-noise) if self.replaced else ratio

    def _log_mixture(self, noise: Array) -> Array:
        """log sum_k weight_k shifted_k / unshifted."""
        if len(noise) > (chunk := _CHUNK // len(self._weights)):
            parts = (noise[start : start + chunk] for start in range(0, len(noise), chunk))
            return np.concatenate([self._log_mixture(part) for part in parts])
        top = np.full(len(noise), -np.inf)
        terms = []
        for k, weight in self._weights:
            # with next to no noise a ratio may be no number
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
        """Outcomes at which the log-likelihood ratio is `losses`; infinite where there is no mass."""
        table, values = _ratio_table(self)
        after = np.searchsorted(values, losses)
        outcomes = np.where(after == 0, -np.inf, np.inf)
        inside = np.flatnonzero((after > 0) & (after < len(values)))
        after, target = after[inside], losses[inside]
        low, high = table[after - 1], table[after]
        tolerance = self.loss_rounding / 4 * (1 + np.abs(target))
        last, last_error = low, values[after - 1] - target
        outcome, error = high, values[after] - target
        # Secants through the last two outcomes; the bracket is halved where they leave it or do not end.
        turn = 0
        while len(inside):
            with np.errstate(divide="ignore", invalid="ignore"):
                secant = outcome - error * (outcome - last) / (error - last_error)
            usable = (low < secant) & (secant < high) & (turn < _MAX_SECANTS)
            last, last_error = outcome, error
            outcome = np.where(usable, secant, (low + high) / 2)
            error = self._log_ratio(outcome / self.scale) - target
            outcomes[inside] = outcome
            low, high = np.where(error < 0, outcome, low), np.where(error < 0, high, outcome)
            middle = (low + high) / 2
            # where no double lies between the two, the loss at either is as close as can be
            rest = (np.abs(error) > tolerance) & (low < middle) & (middle < high)
            inside, turn = inside[rest], turn + 1
            target, tolerance, low, high, last, last_error, outcome, error = (
                each[rest] for each in (target, tolerance, low, high, last, last_error, outcome, error)
            )
        # rounding must not put two cuts in the wrong order
        return np.maximum.accumulate(outcomes)


@lru_cache(maxsize=16)
def _binomial_weights(size: int, rate: float) -> tuple[tuple[int, float], ...]:
    """Numbers drawn out of `size`, and their chances to the last bit; without those that underflow."""
    drawn, outcomes = rate.as_integer_ratio()
    chances = (
        (k, math.comb(size, k) * drawn**k * (outcomes - drawn) ** (size - k) / outcomes**size)
        for k in range(size + 1)
    )
    return tuple((k, chance) for k, chance in chances if chance > 0)


@lru_cache(maxsize=4)
def _ratio_table(law: GroupLaw) -> tuple[Array, Array]:
    """Increasing outcomes, from one end of the mass to the other, and their log-likelihood ratios."""
    # Beyond the shifts a bounded ratio is flat.
    bounded = law.noise.max_privacy_loss < math.inf
    reach = 0.0 if bounded else law.noise.inverse_survival(_NO_MASS) * law.scale
    table = np.linspace(-law._mirrored - reach, law.size + reach, _TABLE_SIZE)
    return table, np.maximum.accumulate(law._log_ratio(table / law.scale))
