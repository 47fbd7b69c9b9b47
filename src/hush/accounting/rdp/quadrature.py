"""Certified upper bounds on moments of a symmetric one-dimensional law, by quadrature.

Gauss-Legendre quadrature on panels. A bound on the integrand on a complex disc around a panel bounds the
error, and panels are halved until the bounds are small. All error bounds are added to the value.
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
    """The integrand for pairs of order and shift, on a side of the kink."""

    beta: float
    rate: float
    order: Array
    shift: Array
    side: Array

    def log_ratio(self, u: Array) -> Array:
        """L at distance u: |x|^beta - u^beta, without cancellation for large u."""
        x = self.shift + self.side * u
        uncancelled = np.expm1(self.beta * np.log1p((x - u) / u)) * u**self.beta
        return np.where(2 * u < x, x**self.beta - u**self.beta, uncancelled)

    def log_value(self, u: Array) -> Array:
        """The log of the integrand at distance u."""
        return self.log_weight(self.log_ratio(u)) - u**self.beta

    def log_weight(self, log_ratio: Array) -> Array:
        """The log of the integrand without exp(-u^beta), an increasing function of L."""
        order, power = self.order, self.order - 1
        if self.rate == 1:
            return log_expm1(power * log_ratio) + log1mexp(-order * log_ratio)
        up, down = (_log_convex_remainder(order, self.rate, sign * log_ratio) for sign in (1, -1))
        return np.logaddexp(up - log_ratio, down)

    def log_tail(self, u: Array) -> Array:
        """The log of a bound on the integral beyond u (infinite if there is none).

        The integrand is at most a exp(psi), psi = (a-1) L - u^beta, and psi is concave once it
        decreases.
        """
        b = self.beta
        slope = (self.order - 1) * ((self.shift + u) ** (b - 1) - u ** (b - 1)) - u ** (b - 1)
        value = np.log(self.order) + (self.order - 1) * self.log_ratio(u) - u**b - np.log(-b * slope)
        return np.where(slope < 0, value, np.inf)

    def log_largest(self, u: Array, reach: Array) -> Array:
        """The log of a bound on the integrand's modulus on the complex disc around u (reach < u).

        Infinite if the disc may contain a zero of 1 - q + q r, where powers are not single-valued.
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
        """log of a bound on |g(w)| / |1 + w|^a, w = q (r - 1), on the disc."""
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
        """log of a bound on |g(w)|, w = q (1/r - 1), on the disc."""
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
    """Maximum of |z|^power on the disc around a positive centre."""
    return np.asarray((centre + reach if power >= 0 else centre - reach) ** power)


def _log_mixture_ratio(rate: float, log_ratio: Array) -> Array:
    """log(1 - q + q exp(log_ratio))."""
    return log_mixture_ratio(rate, log_ratio, log_weights_numpy(rate))


def _posterior_weight(rate: float, log_ratio: Array) -> Array:
    """q exp(log_ratio) / (1 - q + q exp(log_ratio)): the slope of `_log_mixture_ratio`."""
    if rate == 1:
        return np.ones_like(log_ratio)
    log_weight = np.log(rate) + log_ratio - _log_mixture_ratio(rate, log_ratio)
    return np.asarray(np.exp(np.minimum(log_weight, 0.0)))


def _log_convex_remainder(order: Array, rate: float, log_ratio: Array) -> Array:
    """log((1 + w)^a - 1 - a w), w = q (exp(log_ratio) - 1), accurate for every w > -1."""
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
# The Bernstein ellipse with semi-axes of sum _RHO half-widths lies in the disc of radius _REACH
# half-widths; error bound of Trefethen, Approximation Theory and Approximation Practice, Thm 19.3.
_RHO = 3.0
_REACH = (_RHO + 1 / _RHO) / 2
_LOG_GAUSS = math.log(64 / 15 / (1 - _RHO**-2)) - 2 * (len(_NODES) - 1) * math.log(_RHO)
# Allowed error per panel, and negligible size of a panel, relative to the integral.
_LOG_TOLERANCE, _LOG_NEGLIGIBLE = math.log(1e-12), math.log(1e-14)
# The result is infinite if more halvings or panels are necessary.
_MAX_HALVINGS, _MAX_PANELS = 60, 1_000_000
# Pairs of order and shift processed at a time, to limit memory.
_CHUNK = 1000


def log_moment_minus_one(beta: float, rate: float, orders: Array, shifts: Array) -> Array:
    """log(E_f (1 - q + q r)^a - 1) at each pair of order and shift (> 0), rounded up.

    f is the density proportional to exp(-|x|^beta), and r the ratio of the shifted density to f.
    **Guarantee.** An upper bound, within about 1e-10; infinite if powers overflow.
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
    """For each (order, shift), in logs: integral, error bound, largest panel and exponent.

    A panel is a column: index of the (order, shift), side of the kink, and ends of an interval of
    distances from the kink.
    """

    def __init__(self, beta: float, rate: float, orders: Array, shifts: Array) -> None:
        self.beta, self.rate, self.orders, self.shifts = beta, rate, orders, shifts
        self.log_total = np.full(len(orders), -np.inf)
        self.log_error = np.full(len(orders), -np.inf)
        self.log_peak = np.full(len(orders), -np.inf)
        self.exponent = np.zeros(len(orders))

    def log_upper(self) -> Array:
        """Logs of the integrals plus all error bounds."""
        panels = self._initial_panels()
        for _ in range(_MAX_HALVINGS):
            panels = self._integrate_or_dismiss(panels)
            if not 0 < panels.shape[1] <= _MAX_PANELS:
                break
            pair, side, low, high = panels
            middle = (low + high) / 2
            panels = np.hstack([[pair, side, low, middle], [pair, side, middle, high]])
        self.log_error[panels[0].astype(np.intp)] = np.inf
        # a sum of positive terms; an exponent E has an error of a few units of E
        rounding = 1e-12 + 32 * UNIT * self.exponent
        return np.asarray(np.logaddexp(self.log_total, self.log_error) + rounding)

    def _integrand(self, pair: npt.NDArray[np.intp], side: Array) -> Integrand:
        return Integrand(self.beta, self.rate, self.orders[pair], self.shifts[pair], side)

    def _initial_panels(self) -> Array:
        """Panels with doubling widths from the kink; the error includes bounds on the tails."""
        all_pairs = np.arange(len(self.orders))
        steepness = 1 + self.orders * self.beta * self.shifts ** (self.beta - 1)
        start = 2.0**-17 * np.minimum(self.shifts, 1 / steepness)
        # L, and so the weight, is largest at the kink on its left side, and increases on its right side
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
        """Integrate panels with small error bounds, drop negligible panels, return the others."""
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
