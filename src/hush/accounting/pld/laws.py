"""Normal noise, in units of its standard deviation."""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import erf, gammainc, gammaincc, ndtr, ndtri

from hush.accounting.pld.privacy_loss import UNIT, Array


@dataclass(frozen=True)
class NormalLaw:
    """N(0, scale^2); moved by one, the log-ratio at x is (2x - 1) / (2 scale^2)."""

    scale: float

    @property
    def most(self) -> float:
        return math.inf

    @property
    def distance(self) -> float:
        return float(erf(1 / self.scale / math.sqrt(8)))

    def ratio(self, noise: Array, shift: float) -> Array:
        return (noise + (shift - 0.5) / self.scale) / self.scale

    def cuts(self, ratios: Array) -> tuple[Array, Array]:
        spread = self.scale * ratios
        return spread + 0.5 / self.scale, spread - 0.5 / self.scale

    def tail(self, noise: Array) -> Array:
        return np.asarray(ndtr(-noise))

    def rounding(self, noise: Array) -> Array:
        # Measured against 40 digits: ndtr is off by at most this much on -37 < x < 0.
        return 5 + 2 * np.minimum(noise, 38.0) ** 2

    def far(self, tail: float) -> float:
        return -float(ndtri(tail))

    def nodes(self, tail: float) -> tuple[Array, Array]:
        noise = np.linspace(-self.far(tail), self.far(tail), 400)
        weight = -(noise**2) / 2
        weight -= np.logaddexp.reduce(weight)
        return noise, weight


# exp(-FARTHEST) is zero: no mass lies beyond noise whose power is this.
FARTHEST = 746.0
_TABLE, _ROUNDS = 4096, 4


@dataclass(frozen=True)
class PowerLaw:
    """Density proportional to exp(-|x / scale|^beta), 1 <= beta."""

    beta: float
    scale: float

    @property
    def most(self) -> float:
        return 1 / self.scale if self.beta == 1 else math.inf

    @property
    def distance(self) -> float:
        with np.errstate(over="ignore"):
            return float(gammainc(1 / self.beta, np.power(self._half, self.beta)))

    def ratio(self, noise: Array, shift: float) -> Array:
        place = 2 * self.scale * noise + (2 * shift - 1)
        return np.sign(place) * self._ratio(np.abs(place))

    def cuts(self, ratios: Array) -> tuple[Array, Array]:
        find = self._flat if self.beta == 1 else self._place
        place = np.sign(ratios) * find(np.abs(ratios))
        return (place + 1) * self._half, (place - 1) * self._half

    def tail(self, noise: Array) -> Array:
        if self.beta == 1:
            return np.exp(-noise) / 2
        powers = self._powers(noise)
        tails = np.asarray(gammaincc(1 / self.beta, powers)) / 2
        if self.beta < 3:
            # scipy's series for the logarithm of gamma is cut short here, and worst at beta = 2.
            near = powers < 1.1
            tails[near] = (1 - self._body(noise[near], powers[near])) / 2
        return tails

    def rounding(self, noise: Array) -> Array:
        # Measured against 30 digits, at noise given and at noise from `cuts`.
        return (4 if self.beta == 1 else 160) + 4 * (1 + self.beta) * self._powers(noise)

    def far(self, tail: float) -> float:
        # gammaincc(1 / beta, x) <= exp(-x): a smaller shape is a smaller gamma variable.
        return float(max(-math.log(2 * tail), 0.0) ** (1 / self.beta))

    def nodes(self, tail: float) -> tuple[Array, Array]:
        # Even in the root of the power, as the normal's are: dense at the peak, few far out.
        root = math.sqrt(max(-math.log(2 * tail), 1.0))
        edges = np.linspace(-root, root, 401)
        edges = np.sign(edges) * np.abs(edges) ** (2 / self.beta)
        noise = (edges[1:] + edges[:-1]) / 2
        tails = self.tail(np.abs(edges))
        with np.errstate(divide="ignore"):
            weight = np.log(np.abs(np.diff(tails)))
        return noise, weight - np.logaddexp.reduce(weight)

    @property
    def _half(self) -> float:
        return 0.5 / self.scale

    def _powers(self, noise: Array) -> Array:
        powers: Array = np.minimum(noise, FARTHEST ** (1 / self.beta)) ** self.beta
        return powers

    def _ratio(self, place: Array) -> Array:
        """The log-ratio at |2x - 1| = `place`, with relative accuracy however small it is."""
        beta, half = self.beta, self._half
        inner = place < 1
        with np.errstate(divide="ignore", over="ignore", under="ignore"):
            y = np.where(inner & (place > 0), place, 0.5)
            near = np.expm1(beta * np.log1p(y)) - np.expm1(beta * np.log1p(-y))
            y = np.where(inner, 1.0, place)
            far = ((1 + y) * half) ** beta * -np.expm1(beta * np.log1p(-2 / (1 + y)))
            return np.where(place > 0, np.where(inner, np.power(half, beta) * near, far), 0.0)

    def _slope(self, place: Array) -> Array:
        """The derivative of `_ratio`."""
        beta, half = self.beta, self._half
        above, below = ((1 + place) * half) ** (beta - 1), (np.abs(1 - place) * half) ** (beta - 1)
        return beta * half * (above + np.where(place < 1, below, -below))

    def _flat(self, ratios: Array) -> Array:
        """Where the log-ratio of Laplace noise is `ratios`: never beyond its flat ends."""
        place = ratios * self.scale
        return np.where(place < 1, place, np.inf)

    def _place(self, ratios: Array) -> Array:
        """Where the log-ratio is `ratios`: from a table, by Newton's method, else by bisection."""
        farthest = 2 * self.scale * FARTHEST ** (1 / self.beta) + 1
        table = np.geomspace(1e-9, farthest, _TABLE)
        values = np.maximum.accumulate(self._ratio(table))
        usable = (values > 1e-300) & (values < np.inf)
        table, values = table[usable], values[usable]
        after = np.searchsorted(values, ratios)
        # Below the table the ratio is linear to the last bit; beyond it there is no mass.
        places = np.where(after == 0, np.minimum(ratios, values[0]) / values[0] * table[0], np.inf)
        inside = (after > 0) & (after < len(values))
        aim, low, high = ratios[inside], table[after[inside] - 1], table[after[inside]]
        place = np.exp(np.interp(np.log(aim), np.log(values), np.log(table)))
        for _ in range(_ROUNDS):
            with np.errstate(all="ignore"):
                step = (self._ratio(place) - aim) / self._slope(place)
            place = np.clip(place - np.where(np.isfinite(step), step, 0.0), low, high)
        astray = np.abs(self._ratio(place) - aim) > 8 * self.beta * UNIT * aim
        place[astray] = self._bisected(aim[astray], low[astray], high[astray])
        places[inside] = place
        return places

    def _bisected(self, ratios: Array, low: Array, high: Array) -> Array:
        """Where between `low` and `high` the log-ratio is `ratios`, to the last bit."""
        while ((low < (middle := (low + high) / 2)) & (middle < high)).any():
            less = self._ratio(middle) < ratios
            low, high = np.where(less, middle, low), np.where(less, high, middle)
        return low

    def _body(self, noise: Array, powers: Array) -> Array:
        """The mass within `noise` of zero, where `powers` = noise^beta is small: a power series."""
        shape = 1 / self.beta
        total = term = np.ones(len(powers))
        for n in range(1, 24):
            term = term * powers / (shape + n)
            total = total + term
        return noise * np.exp(-powers) / math.gamma(1 + shape) * total
