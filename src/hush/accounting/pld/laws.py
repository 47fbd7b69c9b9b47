"""Privacy loss laws: normal and generalized Gaussian noise on a number that a record shifts by one.

Outcomes x are `shift + scale * noise`; inverting the log-likelihood ratio cuts them at given losses.
"""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import erf, gammainc, gammaincc, ndtr, ndtri

from hush.accounting.pld.privacy_loss import (
    UNIT,
    Array,
    CellMasses,
    Direction,
    PrivacyLossLaw,
    by_loss,
    noise_masses,
)


@dataclass(frozen=True)
class GaussianLaw:
    """N(0, scale^2); shifted by one, the log-likelihood ratio at x is (2x - 1) / (2 scale^2)."""

    scale: float

    @property
    def max_privacy_loss(self) -> float:
        return math.inf

    @property
    def total_variation(self) -> float:
        return float(erf(1 / self.scale / math.sqrt(8)))

    def log_likelihood_ratio(self, noise: Array, shift: float) -> Array:
        return (noise + (shift - 0.5) / self.scale) / self.scale

    def invert_ratio(self, ratios: Array) -> tuple[Array, Array]:
        spread = self.scale * ratios
        return spread + 0.5 / self.scale, spread - 0.5 / self.scale

    def survival(self, noise: Array) -> Array:
        return np.asarray(ndtr(-noise))

    def survival_error(self, noise: Array) -> Array:
        # Measured against 40 digits: ndtr is off by at most this much on -37 < x < 0.
        return 5 + 2 * np.minimum(noise, 38.0) ** 2

    def inverse_survival(self, tail: float) -> float:
        return -float(ndtri(tail))

    def quadrature(self, tail: float) -> tuple[Array, Array]:
        noise = np.linspace(-self.inverse_survival(tail), self.inverse_survival(tail), 400)
        weight = -(noise**2) / 2
        weight -= np.logaddexp.reduce(weight)
        return noise, weight


# exp(-MAX_POWER) underflows: no mass lies beyond noise whose power is this.
MAX_POWER = 746.0
_TABLE_SIZE, _NEWTON_STEPS = 4096, 4


@dataclass(frozen=True)
class GeneralizedGaussianLaw:
    """Generalized Gaussian: density proportional to exp(-|x / scale|^beta), 1 <= beta."""

    beta: float
    scale: float

    @property
    def max_privacy_loss(self) -> float:
        return 1 / self.scale if self.beta == 1 else math.inf

    @property
    def total_variation(self) -> float:
        with np.errstate(over="ignore"):
            return float(gammainc(1 / self.beta, np.power(self._half, self.beta)))

    def log_likelihood_ratio(self, noise: Array, shift: float) -> Array:
        place = 2 * self.scale * noise + (2 * shift - 1)
        return np.sign(place) * self._ratio(np.abs(place))

    def invert_ratio(self, ratios: Array) -> tuple[Array, Array]:
        invert = self._invert_laplace if self.beta == 1 else self._invert
        place = np.sign(ratios) * invert(np.abs(ratios))
        return (place + 1) * self._half, (place - 1) * self._half

    def survival(self, noise: Array) -> Array:
        if self.beta == 1:
            return np.exp(-noise) / 2
        powers = self._powers(noise)
        tails = np.asarray(gammaincc(1 / self.beta, powers)) / 2
        if self.beta < 3:
            # scipy's series for the logarithm of gamma is cut short here, and worst at beta = 2.
            near = powers < 1.1
            tails[near] = (1 - self._central_mass(noise[near], powers[near])) / 2
        return tails

    def survival_error(self, noise: Array) -> Array:
        # Measured against 30 digits, at noise given and at noise from `invert_ratio`.
        return (4 if self.beta == 1 else 160) + 4 * (1 + self.beta) * self._powers(noise)

    def inverse_survival(self, tail: float) -> float:
        # gammaincc(1 / beta, x) <= exp(-x): a smaller shape is a smaller gamma variable.
        return float(max(-math.log(2 * tail), 0.0) ** (1 / self.beta))

    def quadrature(self, tail: float) -> tuple[Array, Array]:
        # Even in the root of the power, as the normal's are: dense at the peak, few far out.
        root = math.sqrt(max(-math.log(2 * tail), 1.0))
        edges = np.linspace(-root, root, 401)
        edges = np.sign(edges) * np.abs(edges) ** (2 / self.beta)
        noise = (edges[1:] + edges[:-1]) / 2
        tails = self.survival(np.abs(edges))
        with np.errstate(divide="ignore"):
            weight = np.log(np.abs(np.diff(tails)))
        return noise, weight - np.logaddexp.reduce(weight)

    @property
    def _half(self) -> float:
        return 0.5 / self.scale

    def _powers(self, noise: Array) -> Array:
        powers: Array = np.minimum(noise, MAX_POWER ** (1 / self.beta)) ** self.beta
        return powers

    def _ratio(self, place: Array) -> Array:
        """Log-likelihood ratio at |2x - 1| = `place`, with relative accuracy however small it is."""
        beta, half = self.beta, self._half
        inner = place < 1
        with np.errstate(divide="ignore", over="ignore", under="ignore"):
            y = np.where(inner & (place > 0), place, 0.5)
            near = np.expm1(beta * np.log1p(y)) - np.expm1(beta * np.log1p(-y))
            y = np.where(inner, 1.0, place)
            far = ((1 + y) * half) ** beta * -np.expm1(beta * np.log1p(-2 / (1 + y)))
            return np.where(place > 0, np.where(inner, np.power(half, beta) * near, far), 0.0)

    def _slope(self, place: Array) -> Array:
        """Derivative of `_ratio`."""
        beta, half = self.beta, self._half
        above, below = ((1 + place) * half) ** (beta - 1), (np.abs(1 - place) * half) ** (beta - 1)
        return beta * half * (above + np.where(place < 1, below, -below))

    def _invert_laplace(self, ratios: Array) -> Array:
        """Where the ratio of Laplace noise is `ratios`; infinite beyond its largest value."""
        place = ratios * self.scale
        return np.where(place < 1, place, np.inf)

    def _invert(self, ratios: Array) -> Array:
        """Where `_ratio` is `ratios`: from a table, by Newton's method, else by bisection."""
        end = 2 * self.scale * MAX_POWER ** (1 / self.beta) + 1
        table = np.geomspace(1e-9, end, _TABLE_SIZE)
        values = np.maximum.accumulate(self._ratio(table))
        usable = (values > 1e-300) & (values < np.inf)
        table, values = table[usable], values[usable]
        after = np.searchsorted(values, ratios)
        # Below the table the ratio is linear to the last bit; beyond it there is no mass.
        places = np.where(after == 0, np.minimum(ratios, values[0]) / values[0] * table[0], np.inf)
        inside = (after > 0) & (after < len(values))
        target, low, high = ratios[inside], table[after[inside] - 1], table[after[inside]]
        place = np.exp(np.interp(np.log(target), np.log(values), np.log(table)))
        for _ in range(_NEWTON_STEPS):
            with np.errstate(all="ignore"):
                step = (self._ratio(place) - target) / self._slope(place)
            place = np.clip(place - np.where(np.isfinite(step), step, 0.0), low, high)
        unconverged = np.abs(self._ratio(place) - target) > 8 * self.beta * UNIT * target
        place[unconverged] = self._bisected(target[unconverged], low[unconverged], high[unconverged])
        places[inside] = place
        return places

    def _bisected(self, ratios: Array, low: Array, high: Array) -> Array:
        """Where between `low` and `high` the log-ratio is `ratios`, to the last bit."""
        while ((low < (middle := (low + high) / 2)) & (middle < high)).any():
            less = self._ratio(middle) < ratios
            low, high = np.where(less, middle, low), np.where(less, high, middle)
        return low

    def _central_mass(self, noise: Array, powers: Array) -> Array:
        """Mass within `noise` of zero, where `powers` = noise^beta is small: a power series."""
        shape = 1 / self.beta
        total = term = np.ones(len(powers))
        for n in range(1, 24):
            term = term * powers / (shape + n)
            total = total + term
        return noise * np.exp(-powers) / math.gamma(1 + shape) * total


_GROUP_TABLE_SIZE = 1 << 14
_MAX_SECANTS = 12
# Terms of mixtures that are held at a time, to bound the memory.
_CHUNK = 1 << 21
# No mass lies beyond noise of this tail, the smallest double.
_NO_MASS = 5e-324


@dataclass(frozen=True)
class GroupLaw(PrivacyLossLaw):
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

    def _cell_masses(self, direction: Direction, cuts: Array) -> CellMasses:
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
    table = np.linspace(-law._mirrored - reach, law.size + reach, _GROUP_TABLE_SIZE)
    return table, np.maximum.accumulate(law._log_ratio(table / law.scale))
