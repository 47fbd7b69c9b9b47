"""Rényi divergence of one coordinate, between a noise density and its subsampled shift."""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from hush.accounting.numerics import OUTWARD, Array, log1mexp, log_binomial, log_weights_numpy
from hush.accounting.rdp.quadrature import log_moment_minus_one


@dataclass(frozen=True)
class CoordinateRDP:
    """RDP of one coordinate with noise of density ~ exp(-(|x| / scale)^beta), `beta` >= 1.

    `beta` = 1 is Laplace noise; `beta` = 2 is Gaussian noise with standard deviation scale / sqrt(2).
    """

    beta: float
    scale: float
    rate: float = 1.0

    @property
    def fisher(self) -> float:
        """Fisher information of the location: beta^2 Gamma(2 - 1/beta) / Gamma(1/beta) / scale^2."""
        ratio = gammaln(2 - 1 / self.beta) - gammaln(1 / self.beta)
        return float(self.beta**2 * math.exp(ratio) / self.scale**2)

    def __call__(self, orders: npt.ArrayLike, shifts: npt.ArrayLike) -> Array:
        """Larger of the two divergences D_a between law(0) and (1 - rate) law(0) + rate law(shift).

        **Guarantee.** An upper bound with relative error below 1e-8. It uses closed forms at rate 1 for
        beta 1 and 2 (Mironov 2017), a binomial sum for Gaussian noise at integer orders, and certified
        quadrature otherwise (docs/guarantees/coordinate-wise.md, "Which direction"). Convexity in the
        shift is only proved at rate 1 and at integer orders.
        """
        order, shift = np.broadcast_arrays(
            np.asarray(orders, dtype=float), np.abs(np.asarray(shifts, dtype=float))
        )
        whole = bool((order == np.round(order)).all()) and float(order.max(initial=0)) <= 1000
        if self.beta == 2 and self.rate < 1 and whole:
            return self._binomial(order, shift / self.scale)
        in_units = (shift / self.scale).ravel()
        moments = _log_moments(self.beta, self.rate, order.tobytes(), in_units.tobytes())
        return np.asarray(OUTWARD * moments.reshape(order.shape) / (order - 1))

    def curvature(self, order: Array, reach: Array) -> Array:
        """Constant K with D_a <= K shift^2 for all shifts up to `reach`.

        K is infinite if `reach` is too large. Its limit for reach -> 0 is exact: a rate^2 / 2 times the
        Fisher information. Proof: docs/guarantees/coordinate-wise.md, "Near zero".
        """
        limit = order * self.rate**2 * self.fisher / 2
        if self.quadratic:
            return limit
        power = 2 - 1 / self.beta
        if self.rate == 1:
            widening = (1 + reach / self.scale / 2) ** (self.beta - 1)
            e = (order - 0.5) * self.beta * reach / self.scale * widening
            e = np.minimum(e, 1.0)
            rise = (np.exp(e) * np.maximum(1 - e, 1e-100) ** -power + np.exp(-e) * (1 + e) ** -power) / 2
        else:
            e = np.minimum(np.maximum(order, 4 - order) * self.beta * reach / self.scale, 1.0)
            rise = np.exp(e) * np.maximum(1 - e, 1e-100) ** -power
        return np.where(e < 1, limit * rise * OUTWARD, np.inf)

    def nearly_quadratic(self, order: float) -> float:
        """Approximation of the largest shift for which `curvature` is within 0.005% of its limit."""
        if self.rate == 1:
            # the rise is 1 + (1/2 + g + g (g + 1) / 2) e^2 + ..., g = 2 - 1/beta < 2
            return 3e-3 * self.scale / self.beta / (order - 0.5)
        return 2e-5 * self.scale / self.beta / max(order, 4 - order)

    def min_moment_curvature(self, order: float, reach: float) -> float:
        """Lower bound m >= 0 on the second derivative of exp((order - 1) D) for shifts up to `reach`.

        It is about order (order - 1) times the Fisher information if `reach` is small, and 0 if no bound
        is proved, e.g. for beta < 2. Proof: docs/guarantees/coordinate-wise.md, "A lower bound on the
        curvature".
        """
        beta, d = self.beta, reach / self.scale / 2
        if self.rate < 1 or beta < 2 or d * beta >= 1:
            return 0.0

        def moment(power: float) -> float:
            return math.exp(gammaln((power + 1) / beta) - gammaln(1 / beta))

        fisher = moment(2 * beta - 2)
        widening = (1 + d) ** (beta - 2) * (fisher + moment(3 * beta - 4))
        lost = (beta - 1) * d**2 * (moment(2 * beta - 4) + beta / 2 * widening)
        kink = 2 * d ** (2 * beta - 1) * beta / math.gamma(1 / beta)
        least = float(max(0.0, beta**2 * (fisher - lost - kink)) / self.scale**2 / OUTWARD)
        return order * (order - 1) * least

    @property
    def quadratic(self) -> bool:
        """Whether the divergence is a multiple of shift^2 at every order."""
        return self.beta == 2 and self.rate == 1

    def _binomial(self, order: Array, shift: Array) -> Array:
        """Divergence for Gaussian noise at integer orders, from a binomial sum.

        1 is subtracted from every term to avoid cancellation.
        """
        divergences = np.zeros(order.shape)
        for a in np.unique(order):
            v = np.arange(2, a + 1)
            log_weight = log_binomial(a, v, log_weights_numpy(self.rate))
            at_order = order == a
            power = v * (v - 1) * shift[at_order][:, None] ** 2
            terms = log_weight + power + log1mexp(-power)
            divergences[at_order] = np.logaddexp(0.0, np.logaddexp.reduce(terms, axis=1)) / (a - 1)
        return OUTWARD * divergences


@lru_cache(maxsize=512)
def _log_moments(beta: float, rate: float, orders: bytes, shifts: bytes) -> Array:
    """log E r^a at each pair of order and shift. The arrays are passed as bytes to be hashable."""
    order, shift = np.frombuffer(orders), np.frombuffer(shifts)
    moments = np.zeros(len(order))
    moved = shift > 0
    unit = CoordinateRDP(beta, 1.0, rate)
    # powers could underflow for tiny shifts, for which the quadratic bound is accurate
    tiny = moved & (shift * np.maximum(order, 4 - order) * beta < 1e-9)
    moments[tiny] = unit.curvature(order[tiny], shift[tiny])
    moments[tiny] *= shift[tiny] ** 2 * (order[tiny] - 1)
    rest = moved & ~tiny
    if rate == 1 and beta == 2:
        moments[rest] = order[rest] * (order[rest] - 1) * shift[rest] ** 2
    elif rate == 1 and beta == 1:  # Mironov 2017, Proposition 6, as a sum of positive terms
        a, s = order[rest], shift[rest]
        up = np.log(a) + _log_exp_remainder(s * (a - 1))
        down = np.log(a - 1) + _log_exp_remainder(-s * a)
        moments[rest] = np.logaddexp(0.0, np.logaddexp(up, down) - np.log(2 * a - 1))
    elif rest.any():
        moments[rest] = np.logaddexp(0.0, log_moment_minus_one(beta, rate, order[rest], shift[rest]))
    moments.flags.writeable = False
    return moments


def _log_exp_remainder(values: Array) -> Array:
    """log(exp(y) - 1 - y) without cancellation or overflow."""
    series = np.ones_like(values)
    for k in range(9, 2, -1):
        series = 1 + values / k * series
    small = np.abs(values) < 0.1
    near = 2 * np.log(np.abs(values)) - math.log(2) + np.log(np.where(small, series, 1.0))
    capped = np.clip(values, -1e300, 50.0)
    far = np.log(np.where(small, 1.0, np.expm1(capped) - capped)) + np.maximum(values - 50.0, 0.0)
    return np.where(small, near, far)
