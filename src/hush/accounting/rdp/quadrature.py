"""Certified moments of a symmetric one-dimensional law: an upper bound that is nearly the value.

Gauss-Legendre on panels; the error on each is bounded by the size of the integrand on a complex
disc around it, and panels are halved until the bounds are small. All bounds are added to the value.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from hush.accounting.numerics import UNIT, Array, log_sum_exp
from hush.accounting.rdp.integrand import Integrand

_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(24)
# The Bernstein ellipse whose semi-axes add up to _RHO half-widths lies in the disc of radius _REACH
# half-widths; error bound of Trefethen, Approximation Theory and Approximation Practice, Thm 19.3.
_RHO = 3.0
_REACH = (_RHO + 1 / _RHO) / 2
_LOG_GAUSS = math.log(64 / 15 / (1 - _RHO**-2)) - 2 * (len(_NODES) - 1) * math.log(_RHO)
# The error that a panel may add, and the size too small to integrate, relative to the integral.
_LOG_TOLERANCE, _LOG_NEGLIGIBLE = math.log(1e-12), math.log(1e-14)
# Where more halvings or panels would be needed the answer is infinite.
_MAX_HALVINGS, _MAX_PANELS = 60, 1_000_000
# Pairs of order and shift that are worked on at a time, to bound the memory.
_CHUNK = 1000

_Index = npt.NDArray[np.intp]


def log_moment_minus_one(beta: float, rate: float, orders: Array, shifts: Array) -> Array:
    """log(E_f (1 - q + q r)^a - 1) at each pair of order and shift (> 0), rounded up.

    f is the law of density proportional to exp(-|x|^beta) and r the ratio of its shifted density
    to it. **Guarantee.** Never below the true value, and above it by 1e-10 or so; infinite where
    powers overflow. docs/guarantees/coordinate-wise.md, "Quadrature".
    """
    log_integrals = []
    with np.errstate(all="ignore"):
        for first in range(0, len(orders), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            log_integrals.append(
                _AdaptiveQuadrature(beta, rate, orders[chunk], shifts[chunk]).log_upper()
            )
    value = np.concatenate(log_integrals) - math.log(2) - gammaln(1 + 1 / beta)
    return np.where(np.isnan(value), np.inf, value)


@dataclass(frozen=True, eq=False)
class _PanelArray:
    """Quadrature panels: intervals of the distance from the kink; `pair` indexes the (order, shift)."""

    pair: _Index
    side: Array
    low: Array
    high: Array

    def take(self, which: npt.NDArray[Any]) -> "_PanelArray":
        return _PanelArray(self.pair[which], self.side[which], self.low[which], self.high[which])

    def halves(self) -> "_PanelArray":
        middle = (self.low + self.high) / 2
        lower, upper = replace(self, high=middle), replace(self, low=middle)
        return _concatenate([lower, upper])


def _concatenate(parts: list[_PanelArray]) -> _PanelArray:
    """The panels of all parts in one array."""
    columns = zip(*((part.pair, part.side, part.low, part.high) for part in parts), strict=True)
    return _PanelArray(*map(np.concatenate, columns))


class _AdaptiveQuadrature:
    """Logs for each (order, shift): the integral, its error bound, the largest panel and exponent."""

    def __init__(self, beta: float, rate: float, orders: Array, shifts: Array) -> None:
        self.beta, self.rate, self.orders, self.shifts = beta, rate, orders, shifts
        self.log_total = np.full(len(orders), -np.inf)
        self.log_error = np.full(len(orders), -np.inf)
        self.log_peak = np.full(len(orders), -np.inf)
        self.exponent = np.zeros(len(orders))

    def log_upper(self) -> Array:
        """The logs of the integrals, rounded up by every error bound."""
        panels = self._initial_panels()
        for _ in range(_MAX_HALVINGS):
            panels = self._integrate_or_dismiss(panels)
            if not 0 < len(panels.pair) <= _MAX_PANELS:
                break
            panels = panels.halves()
        self.log_error[panels.pair] = np.inf
        # a sum of positive terms; an exponent E is off by a few units of E
        rounding = 1e-12 + 32 * UNIT * self.exponent
        upper: Array = np.logaddexp(self.log_total, self.log_error) + rounding
        return upper

    def _integrand(self, pair: _Index, side: Array) -> Integrand:
        return Integrand(self.beta, self.rate, self.orders[pair], self.shifts[pair], side)

    def _initial_panels(self) -> _PanelArray:
        """Panels that double away from the kink; bounds on what they leave out go into the error."""
        all_pairs = np.arange(len(self.orders))
        right, left = (np.full(len(all_pairs), side) for side in (1.0, -1.0))
        steepness = 1 + self.orders * self.beta * self.shifts ** (self.beta - 1)
        start = 2.0**-17 * np.minimum(self.shifts, 1 / steepness)
        # L, and with it the weight, is largest at the kink on the left of it, and grows to its right
        integrand = self._integrand(all_pairs, right)
        largest_log_ratio = np.maximum(integrand.log_ratio(start), self.shifts**self.beta)
        self.log_error = integrand.log_weight(largest_log_ratio) + np.log(2 * start)
        parts = []
        edge, pair = start, all_pairs
        while len(pair):
            upper = np.minimum(2 * edge, self.shifts[pair] / 2)
            parts.append(_PanelArray(pair, left[pair], edge, upper))
            unfinished = upper < self.shifts[pair] / 2
            edge, pair = upper[unfinished], pair[unfinished]
        edge, pair = start, all_pairs
        while len(pair):
            parts.append(_PanelArray(pair, right[pair], edge, 2 * edge))
            edge = 2 * edge
            integrand = self._integrand(pair, right[pair])
            np.maximum.at(self.log_peak, pair, integrand.log_value(edge) + np.log(edge / 2))
            tail = integrand.log_tail(edge)
            finished = (tail <= self.log_peak[pair] + _LOG_NEGLIGIBLE) | ~np.isfinite(edge**self.beta)
            tail = np.where(np.isfinite(edge**self.beta), tail, np.inf)
            self.log_error[pair[finished]] = np.logaddexp(self.log_error[pair[finished]], tail[finished])
            edge, pair = edge[~finished], pair[~finished]
        merged = _concatenate(parts)
        return merged.take(np.isfinite(self.log_error[merged.pair]))

    def _integrate_or_dismiss(self, panels: _PanelArray) -> _PanelArray:
        """Integrate or dismiss the panels whose error bounds allow it; return the others."""
        pair = panels.pair
        integrand = self._integrand(pair, panels.side)
        middle, half = (panels.low + panels.high) / 2, (panels.high - panels.low) / 2
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
        np.logaddexp.at(self.log_total, pair[done], self._log_gauss_legendre(panels.take(done)))
        return panels.take(~(dismissed | done))

    def _log_gauss_legendre(self, panels: _PanelArray) -> Array:
        """The logs of the panels' integrals by Gauss-Legendre."""
        half = (panels.high - panels.low)[:, None] / 2
        u = (panels.low + panels.high)[:, None] / 2 + half * _NODES
        order, shift = self.orders[panels.pair][:, None], self.shifts[panels.pair][:, None]
        integrand = Integrand(self.beta, self.rate, order, shift, panels.side[:, None])
        return log_sum_exp(integrand.log_value(u) + np.log(half * _WEIGHTS))
