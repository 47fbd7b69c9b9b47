"""One-dimensional noise distributions: Gaussian and generalized Gaussian.

Both are symmetric and log-concave, so the log-likelihood ratio of the distribution shifted by 1 and the
unshifted distribution increases with the outcome. Outcomes are `shift + scale * noise`.
"""

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import erf, gammainc, gammaincc, ndtr, ndtri

from hush.accounting.numerics import UNIT, Array

MAX_LOSS = 5e5
"""Largest privacy loss of a step that can be represented on a grid."""


@dataclass(frozen=True)
class GaussianLaw:
    """N(0, scale^2), with log-likelihood ratio (2x - 1) / (2 scale^2) of the shift by 1."""

    scale: float

    min_scale = 1e-3
    """Scale below which losses exceed `MAX_LOSS`."""
    max_privacy_loss = math.inf
    """Upper bound on the log-likelihood ratio of the shifted distribution; may be infinite."""

    @property
    def total_variation(self) -> float:
        """Total variation distance between the shifted and the unshifted distribution."""
        return float(erf(1 / self.scale / math.sqrt(8)))

    def log_likelihood_ratio(self, noise: Array, shift: float) -> Array:
        """log(shifted / unshifted) at the outcomes `shift + scale * noise`."""
        return (noise + (shift - 0.5) / self.scale) / self.scale

    def invert_ratio(self, ratios: Array) -> tuple[Array, Array]:
        """Noise at which the log-likelihood ratio equals `ratios`, without and with the record."""
        spread = self.scale * ratios
        return spread + 0.5 / self.scale, spread - 0.5 / self.scale

    def survival(self, noise: Array) -> Array:
        """Probability above `noise` >= 0, with relative accuracy."""
        return np.asarray(ndtr(-noise))

    def survival_error(self, noise: Array) -> Array:
        """Relative error of `survival` at results of `invert_ratio`, in units of `UNIT`."""
        # Error of ndtr for -37 < x < 0, measured against 40 digits.
        return 5 + 2 * np.minimum(noise, 38.0) ** 2

    def inverse_survival(self, tail: float) -> float:
        """Noise that is exceeded with probability of at most about `tail`."""
        return -float(ndtri(tail))

    def quadrature(self, tail: float) -> tuple[Array, Array]:
        """Nodes up to `inverse_survival(tail)`, and log-weights that approximate the distribution."""
        noise = np.linspace(-self.inverse_survival(tail), self.inverse_survival(tail), 400)
        weight = -(noise**2) / 2
        weight -= np.logaddexp.reduce(weight)
        return noise, weight


# exp(-MAX_POWER) underflows to 0.
MAX_POWER = 746.0
_TABLE_SIZE, _NEWTON_STEPS = 4096, 4


@dataclass(frozen=True)
class GeneralizedGaussianLaw:
    """Generalized Gaussian: density proportional to exp(-|x / scale|^beta), beta >= 1.

    The methods are the same as in `GaussianLaw`.
    """

    beta: float
    scale: float

    @property
    def min_scale(self) -> float:
        return float(MAX_LOSS ** (-1 / self.beta))

    @property
    def max_privacy_loss(self) -> float:
        return 1 / self.scale if self.beta == 1 else math.inf

    @property
    def total_variation(self) -> float:
        with np.errstate(over="ignore"):
            return float(gammainc(1 / self.beta, np.power(0.5 / self.scale, self.beta)))

    def log_likelihood_ratio(self, noise: Array, shift: float) -> Array:
        place = 2 * self.scale * noise + (2 * shift - 1)
        return np.sign(place) * self._ratio(np.abs(place))

    def invert_ratio(self, ratios: Array) -> tuple[Array, Array]:
        place = np.sign(ratios) * self._invert(np.abs(ratios))
        half = 0.5 / self.scale
        return (place + 1) * half, (place - 1) * half

    def survival(self, noise: Array) -> Array:
        if self.beta == 1:
            return np.exp(-noise) / 2
        powers, shape = self._powers(noise), 1 / self.beta
        tails = np.asarray(gammaincc(shape, powers)) / 2
        if self.beta < 3:
            # SciPy's series is inaccurate here, especially at beta = 2, so use a power series for the
            # probability near zero
            near = powers < 1.1
            total = term = np.ones(int(near.sum()))
            for n in range(1, 24):
                term = term * powers[near] / (shape + n)
                total = total + term
            central = noise[near] * np.exp(-powers[near]) / math.gamma(1 + shape) * total
            tails[near] = (1 - central) / 2
        return tails

    def survival_error(self, noise: Array) -> Array:
        # Measured against 30 digits, also at results of `invert_ratio`.
        return (4 if self.beta == 1 else 160) + 4 * (1 + self.beta) * self._powers(noise)

    def inverse_survival(self, tail: float) -> float:
        # gammaincc(1 / beta, x) <= exp(-x), because gamma variables increase with the shape.
        return float(max(-math.log(2 * tail), 0.0) ** (1 / self.beta))

    def quadrature(self, tail: float) -> tuple[Array, Array]:
        # Nodes are equally spaced in the root of the power, as for the normal distribution.
        root = math.sqrt(max(-math.log(2 * tail), 1.0))
        edges = np.linspace(-root, root, 401)
        edges = np.sign(edges) * np.abs(edges) ** (2 / self.beta)
        noise = (edges[1:] + edges[:-1]) / 2
        tails = self.survival(np.abs(edges))
        with np.errstate(divide="ignore"):
            weight = np.log(np.abs(np.diff(tails)))
        return noise, weight - np.logaddexp.reduce(weight)

    def _powers(self, noise: Array) -> Array:
        return np.asarray(np.minimum(noise, MAX_POWER ** (1 / self.beta)) ** self.beta)

    def _ratio(self, place: Array) -> Array:
        """Log-likelihood ratio at |2x - 1| = `place`, with relative accuracy."""
        beta, half = self.beta, 0.5 / self.scale
        inner = place < 1
        with np.errstate(divide="ignore", over="ignore", under="ignore"):
            y = np.where(inner & (place > 0), place, 0.5)
            near = np.expm1(beta * np.log1p(y)) - np.expm1(beta * np.log1p(-y))
            y = np.where(inner, 1.0, place)
            far = ((1 + y) * half) ** beta * -np.expm1(beta * np.log1p(-2 / (1 + y)))
            return np.where(place > 0, np.where(inner, np.power(half, beta) * near, far), 0.0)

    def _invert(self, ratios: Array) -> Array:
        """Inverse of `_ratio`, by a table and Newton's method or bisection.

        Returns infinity above the range of `_ratio`.
        """
        if self.beta == 1:
            place = ratios * self.scale
            return np.where(place < 1, place, np.inf)
        end = 2 * self.scale * MAX_POWER ** (1 / self.beta) + 1
        table = np.geomspace(1e-9, end, _TABLE_SIZE)
        values = np.maximum.accumulate(self._ratio(table))
        usable = (values > 1e-300) & (values < np.inf)
        table, values = table[usable], values[usable]
        after = np.searchsorted(values, ratios)
        # Below the table the ratio is linear in double precision; above it the probability underflows.
        places = np.where(after == 0, np.minimum(ratios, values[0]) / values[0] * table[0], np.inf)
        inside = (after > 0) & (after < len(values))
        target, low, high = ratios[inside], table[after[inside] - 1], table[after[inside]]
        place = np.exp(np.interp(np.log(target), np.log(values), np.log(table)))
        beta, half = self.beta, 0.5 / self.scale
        for _ in range(_NEWTON_STEPS):
            with np.errstate(all="ignore"):
                above = ((1 + place) * half) ** (beta - 1)
                below = (np.abs(1 - place) * half) ** (beta - 1)
                slope = beta * half * (above + np.where(place < 1, below, -below))
                step = (self._ratio(place) - target) / slope
            place = np.clip(place - np.where(np.isfinite(step), step, 0.0), low, high)
        rest = np.abs(self._ratio(place) - target) > 8 * self.beta * UNIT * target
        target, low, high = target[rest], low[rest], high[rest]
        while ((low < (middle := (low + high) / 2)) & (middle < high)).any():
            less = self._ratio(middle) < target
            low, high = np.where(less, middle, low), np.where(less, high, middle)
        place[rest] = low
        places[inside] = place
        return places
