"""Certified upper bounds on moments of a symmetric one-dimensional distribution, by quadrature.

Uses Gauss-Legendre quadrature on panels. The error of a panel is bounded by the maximum of the integrand
on a complex disc around the panel. Panels are halved until the error bounds are small, and all error
bounds are added to the result.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from hush.accounting.numerics import (
    UNIT,
    Array,
    log1mexp,
    log_expm1,
    log_mixture_ratio,
    log_sum_exp,
    log_weights_numpy,
)


@dataclass(frozen=True, eq=False)
class Integrand:
    """Integrand for pairs of order and shift, on one side of the kink."""

    beta: float
    rate: float
    order: Array
    shift: Array
    side: Array

    def log_ratio(self, u: Array) -> Array:
        """Log-ratio L = |x|^beta - u^beta at distance u from the kink, without cancellation."""
        x = self.shift + self.side * u
        uncancelled = np.expm1(self.beta * np.log1p((x - u) / u)) * u**self.beta
        return np.where(2 * u < x, x**self.beta - u**self.beta, uncancelled)

    def log_value(self, u: Array) -> Array:
        """Log of the integrand at distance u."""
        return self.log_weight(self.log_ratio(u)) - u**self.beta

    def log_weight(self, log_ratio: Array) -> Array:
        """Log of the integrand without the factor exp(-u^beta): an increasing function of L."""
        order, power = self.order, self.order - 1
        if self.rate == 1:
            return log_expm1(power * log_ratio) + log1mexp(-order * log_ratio)
        up, down = (_log_convex_remainder(order, self.rate, sign * log_ratio) for sign in (1, -1))
        return np.logaddexp(up - log_ratio, down)

    def log_tail(self, u: Array) -> Array:
        """Log of a bound on the integral beyond u; infinite if no bound is known.

        The integrand is at most a exp(psi) with psi = (a-1) L - u^beta, which is concave where it
        decreases.
        """
        b = self.beta
        slope = (self.order - 1) * ((self.shift + u) ** (b - 1) - u ** (b - 1)) - u ** (b - 1)
        value = np.log(self.order) + (self.order - 1) * self.log_ratio(u) - u**b - np.log(-b * slope)
        return np.where(slope < 0, value, np.inf)

    def log_largest(self, u: Array, reach: Array) -> Array:
        """Log of a bound on the modulus of the integrand on the complex disc around u (reach < u).

        The bound is infinite if the disc may contain a zero of 1 - q + q r, which is a branch point.
        """
        a, b, q = self.order, self.beta, self.rate
        x = self.shift + self.side * u
        bend_u = b * (b - 1) * _power_bound(u, reach, b - 2)
        bend_x = b * (b - 1) * _power_bound(x, reach, b - 2)
        third = np.maximum(_power_bound(u, reach, b - 3), _power_bound(x, reach, b - 3))
        close = np.where(self.side > 0, b * (b - 1) * abs(b - 2) * self.shift * third, np.inf)
        bend = np.minimum(bend_u + bend_x, close)
        slope = b * (self.side * x ** (b - 1) - u ** (b - 1))
        turn = np.abs(slope) * reach + bend * reach**2 / 2
        log_ratio = self.log_ratio(u)
        # |1 - q + q r| >= (1 - q + q |r|) / factor on the disc, if the angle of r is small or one term
        # dominates; otherwise infinite
        narrow = np.where(turn <= 1, 1 / np.cos(np.minimum(turn, 1.0) / 2), np.inf)
        odds = (1 - q) / q * np.exp(turn - log_ratio)
        outweighed = np.where(odds < 0.5, (1 + odds) / (1 - np.minimum(odds, 0.5)), np.inf)
        factor = np.minimum(narrow, outweighed)
        posterior = _posterior_weight(q, log_ratio)
        second = bend_x + a * bend
        if q < 1:
            # log(1 - q + q r) has slope `posterior` in L and second derivative posterior (1 - posterior)
            change = np.log(posterior) + np.log1p(-q) - _log_mixture_ratio(q, log_ratio) + turn
            change = np.minimum(0.25, np.exp(np.minimum(change, 0.0))) * factor**2
            second = bend_x + a * (bend * factor + change * (np.abs(slope) + bend * reach) ** 2)
        first = np.abs(a * posterior * slope - self.side * b * x ** (b - 1))
        log_mixed = _log_mixture_ratio(q, log_ratio)
        up = a * log_mixed - log_ratio - u**b + first * reach + second * reach**2 / 2
        up += self._log_ratio_bound(log_ratio, turn, factor)
        down = -(u**b) + b * u ** (b - 1) * reach + bend_u * reach**2 / 2
        down += self._log_reverse_bound(log_ratio, turn, factor)
        bound = np.logaddexp(up, down)
        return np.where(np.isnan(bound), np.inf, bound)

    def _log_ratio_bound(self, log_ratio: Array, turn: Array, factor: Array) -> Array:
        """Log of a bound on |g(w)| / |1 + w|^a on the disc, for w = q (r - 1)."""
        a, q = self.order, self.rate
        inverse = np.log(factor) - _log_mixture_ratio(q, log_ratio - turn)
        above = np.log(factor) + np.maximum(0.0, _log_mixture_ratio(q, log_ratio + turn))
        stretch = np.where(a >= 2, (a - 2) * np.maximum(inverse, 0.0), (2 - a) * above)
        step = factor * np.exp(turn) * _posterior_weight(q, log_ratio + turn)
        step = np.minimum(step * np.minimum(log_ratio + turn, 2.0), 1 + np.exp(inverse))
        quadratic = np.log(a * (a - 1) / 2) + 2 * np.log(step) + stretch
        plain = np.logaddexp(0.0, np.logaddexp(np.log1p(a) + a * inverse, np.log(a) + (a - 1) * inverse))
        return np.asarray(np.minimum(quadratic, plain))

    def _log_reverse_bound(self, log_ratio: Array, turn: Array, factor: Array) -> Array:
        """Log of a bound on |g(w)| on the disc, for w = q (1/r - 1)."""
        a, q = self.order, self.rate
        back = np.maximum(turn - log_ratio, 0.0)
        step = q * np.minimum((log_ratio + turn) * np.exp(back), 1 + np.exp(turn - log_ratio))
        top = np.maximum(0.0, _log_mixture_ratio(q, turn - log_ratio))
        bottom = _log_mixture_ratio(q, -log_ratio - turn) - np.log(factor)
        stretch = np.where(a >= 2, (a - 2) * top, (a - 2) * bottom)
        quadratic = np.log(a * (a - 1) / 2) + 2 * np.log(step) + stretch
        plain = np.logaddexp(a * _log_mixture_ratio(q, turn - log_ratio), np.log1p(a * step))
        return np.asarray(np.minimum(quadratic, plain))


def _power_bound(centre: Array, reach: Array, power: float) -> Array:
    """Maximum of |z|^power on a disc around a positive centre."""
    return np.asarray((centre + reach if power >= 0 else centre - reach) ** power)


def _log_mixture_ratio(rate: float, log_ratio: Array) -> Array:
    """log(1 - q + q exp(log_ratio))."""
    return log_mixture_ratio(rate, log_ratio, log_weights_numpy(rate))


def _posterior_weight(rate: float, log_ratio: Array) -> Array:
    """q exp(log_ratio) / (1 - q + q exp(log_ratio)): the derivative of `_log_mixture_ratio`."""
    if rate == 1:
        return np.ones_like(log_ratio)
    log_weight = np.log(rate) + log_ratio - _log_mixture_ratio(rate, log_ratio)
    return np.asarray(np.exp(np.minimum(log_weight, 0.0)))


def _log_convex_remainder(order: Array, rate: float, log_ratio: Array) -> Array:
    """log((1 + w)^a - 1 - a w) for w = q (exp(log_ratio) - 1), accurate for every w > -1."""
    w = rate * np.expm1(np.minimum(log_ratio, 300.0))
    power = order * _log_mixture_ratio(rate, log_ratio)
    series = np.ones_like(w)
    for k in range(8, 2, -1):
        series = 1 + (order - k + 1) * w / k * series
    near = np.log(order * (order - 1) / 2) + 2 * np.log(np.abs(w)) + np.log(series)
    middle = np.log(np.expm1(np.minimum(power, 40.0)) - order * w)
    linear = np.where(log_ratio < 300, np.log1p(order * w), np.log(order * rate) + log_ratio)
    far = power + np.log1p(-np.exp(np.minimum(linear - power, 0.0)))
    small = np.maximum(order, 1) * np.abs(w) < 0.02
    return np.where(small, near, np.where(power < 30, middle, far))


_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
# The Bernstein ellipse with semi-axes of sum _RHO half-widths is inside the disc of radius _REACH
# half-widths. Error bound: Trefethen, Approximation Theory and Approximation Practice, Theorem 19.3.
_RHO = 3.0
_REACH = (_RHO + 1 / _RHO) / 2
_LOG_GAUSS = math.log(64 / 15 / (1 - _RHO**-2)) - 2 * (len(_NODES) - 1) * math.log(_RHO)
# Error tolerance per panel, and size of a negligible panel, relative to the integral.
_LOG_TOLERANCE, _LOG_NEGLIGIBLE = math.log(1e-12), math.log(1e-14)
# The result is infinite if more halvings or panels are needed.
_MAX_HALVINGS, _MAX_PANELS = 60, 1_000_000
# Number of (order, shift) pairs per chunk, to limit memory.
_CHUNK = 1000


def log_moment_minus_one(beta: float, rate: float, orders: Array, shifts: Array) -> Array:
    """log(E_f (1 - q + q r)^a - 1) for each pair of order and positive shift, rounded up.

    f is the density proportional to exp(-|x|^beta), and r is the ratio of the shifted density to f.

    **Guarantee.** An upper bound with an error of about 1e-10; infinite if powers overflow. Proof:
    docs/guarantees/coordinate-wise.md, "Quadrature".
    """
    chunks = [slice(first, first + _CHUNK) for first in range(0, len(orders), _CHUNK)]
    with np.errstate(all="ignore"):
        log_integrals = [
            _AdaptiveQuadrature(beta, rate, orders[c], shifts[c]).log_upper() for c in chunks
        ]
    value = np.concatenate(log_integrals) - math.log(2) - gammaln(1 + 1 / beta)
    return np.where(np.isnan(value), np.inf, value)


class _AdaptiveQuadrature:
    """Adaptive quadrature for many (order, shift) pairs.

    The state of each pair is its log-integral, log-error, largest log-panel and largest exponent. A
    panel is a column of an array: index of the pair, side of the kink, and the two ends of an interval
    of distances from the kink.
    """

    def __init__(self, beta: float, rate: float, orders: Array, shifts: Array) -> None:
        self.beta, self.rate, self.orders, self.shifts = beta, rate, orders, shifts
        self.log_total = np.full(len(orders), -np.inf)
        self.log_error = np.full(len(orders), -np.inf)
        self.log_peak = np.full(len(orders), -np.inf)
        self.exponent = np.zeros(len(orders))

    def log_upper(self) -> Array:
        """Logs of the integrals plus their error bounds."""
        panels = self._initial_panels()
        for _ in range(_MAX_HALVINGS):
            panels = self._integrate_or_dismiss(panels)
            if not 0 < panels.shape[1] <= _MAX_PANELS:
                break
            pair, side, low, high = panels
            middle = (low + high) / 2
            panels = np.hstack([[pair, side, low, middle], [pair, side, middle, high]])
        self.log_error[panels[0].astype(np.intp)] = np.inf
        # the terms of the sum are positive, and an exponent E has an error of a few units of E
        rounding = 1e-12 + 32 * UNIT * self.exponent
        return np.asarray(np.logaddexp(self.log_total, self.log_error) + rounding)

    def _integrand(self, pair: npt.NDArray[np.intp], side: Array) -> Integrand:
        return Integrand(self.beta, self.rate, self.orders[pair], self.shifts[pair], side)

    def _initial_panels(self) -> Array:
        """Panels with doubling widths from the kink. Bounds on the tails are added to the error."""
        all_pairs = np.arange(len(self.orders))
        steepness = 1 + self.orders * self.beta * self.shifts ** (self.beta - 1)
        start = 2.0**-17 * np.minimum(self.shifts, 1 / steepness)
        # L, and therefore the weight, is largest at the kink on the left side, and increasing on the
        # right side
        integrand = self._integrand(all_pairs, np.ones(len(all_pairs)))
        largest_log_ratio = np.maximum(integrand.log_ratio(start), self.shifts**self.beta)
        self.log_error = integrand.log_weight(largest_log_ratio) + np.log(2 * start)
        parts = []
        edge, pair = start, all_pairs
        while len(pair):
            upper = np.minimum(2 * edge, self.shifts[pair] / 2)
            parts.append(np.stack([pair, np.full(len(pair), -1.0), edge, upper]))
            unfinished = upper < self.shifts[pair] / 2
            edge, pair = upper[unfinished], pair[unfinished]
        edge, pair = start, all_pairs
        while len(pair):
            right = np.ones(len(pair))
            parts.append(np.stack([pair, right, edge, 2 * edge]))
            edge = 2 * edge
            integrand = self._integrand(pair, right)
            np.maximum.at(self.log_peak, pair, integrand.log_value(edge) + np.log(edge / 2))
            tail = integrand.log_tail(edge)
            finished = (tail <= self.log_peak[pair] + _LOG_NEGLIGIBLE) | ~np.isfinite(edge**self.beta)
            tail = np.where(np.isfinite(edge**self.beta), tail, np.inf)
            self.log_error[pair[finished]] = np.logaddexp(self.log_error[pair[finished]], tail[finished])
            edge, pair = edge[~finished], pair[~finished]
        merged: Array = np.hstack(parts)
        return merged[:, np.isfinite(self.log_error[merged[0].astype(np.intp)])]

    def _integrate_or_dismiss(self, panels: Array) -> Array:
        """Integrate panels with small error bounds, drop negligible panels, and return the others."""
        pair, side, low, high = panels[0].astype(np.intp), *panels[1:]
        integrand = self._integrand(pair, side)
        middle, half = (low + high) / 2, (high - low) / 2
        centre = integrand.log_value(middle) + np.log(2 * half)
        np.maximum.at(self.log_peak, pair, centre)
        exponent = integrand.order * integrand.log_ratio(middle) + middle**self.beta
        np.maximum.at(self.exponent, pair, np.where(centre > self.log_peak[pair] - 40, exponent, 0.0))
        largest = integrand.log_largest(middle, _REACH * half)
        dismissal_error, gauss_error = largest + np.log(2 * half), largest + np.log(half) + _LOG_GAUSS
        dismissed = dismissal_error <= self.log_peak[pair] + _LOG_NEGLIGIBLE
        done = ~dismissed & (gauss_error <= self.log_peak[pair] + _LOG_TOLERANCE)
        np.logaddexp.at(self.log_error, pair[dismissed], dismissal_error[dismissed])
        np.logaddexp.at(self.log_error, pair[done], gauss_error[done])
        whole = self._integrand(pair[done][:, None], side[done][:, None])
        width = half[done][:, None]
        log_values = whole.log_value(middle[done][:, None] + width * _NODES)
        np.logaddexp.at(self.log_total, pair[done], log_sum_exp(log_values + np.log(width * _WEIGHTS)))
        return panels[:, ~(dismissed | done)]
