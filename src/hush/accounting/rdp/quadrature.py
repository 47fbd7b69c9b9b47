"""Certified moments of a symmetric one-dimensional law: an upper bound that is nearly the value.

Gauss-Legendre on panels; the error on each is bounded by the size of the integrand on a complex
disc around it, and panels are halved until the bounds are small. All bounds are added to the value.
"""

import math
from dataclasses import dataclass
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
# What a panel may add to the error, and what is too small to integrate, relative to the whole.
_LOG_TOLERANCE, _LOG_NEGLIGIBLE = math.log(1e-12), math.log(1e-14)
# Halving that goes on for longer than this is given up: the answer is then infinite.
_ROUNDS, _LONGEST = 60, 1_000_000
# Pairs of order and shift that are worked on at a time, to bound the memory.
_TOGETHER = 1000

_Index = npt.NDArray[np.intp]


def log_moment_minus_one(beta: float, rate: float, orders: Array, shifts: Array) -> Array:
    """log(E_f (1 - q + q r)^a - 1) at each pair of order and shift (> 0), rounded up.

    f is the law of density proportional to exp(-|x|^beta) and r the ratio of its shifted density
    to it. **Guarantee.** Never below the true value, and above it by 1e-10 or so; infinite where
    powers overflow. docs/guarantees/coordinate-wise.md, "Quadrature".
    """
    found = []
    with np.errstate(all="ignore"):
        for first in range(0, len(orders), _TOGETHER):
            some = slice(first, first + _TOGETHER)
            found.append(_Integral(beta, rate, orders[some], shifts[some]).log_upper())
    value = np.concatenate(found) - math.log(2) - gammaln(1 + 1 / beta)
    return np.where(np.isnan(value), np.inf, value)


@dataclass(frozen=True, eq=False)
class _Panels:
    """Intervals of the distance from the kink, each owned by a pair of order and shift."""

    owner: _Index
    side: Array
    low: Array
    high: Array

    def take(self, which: npt.NDArray[Any]) -> "_Panels":
        return _Panels(self.owner[which], self.side[which], self.low[which], self.high[which])

    def halves(self) -> "_Panels":
        middle = (self.low + self.high) / 2
        return _joined(
            [
                _Panels(self.owner, self.side, self.low, middle),
                _Panels(self.owner, self.side, middle, self.high),
            ]
        )


def _joined(parts: list[_Panels]) -> _Panels:
    """All the panels of the parts."""
    return _Panels(
        np.concatenate([part.owner for part in parts]),
        np.concatenate([part.side for part in parts]),
        np.concatenate([part.low for part in parts]),
        np.concatenate([part.high for part in parts]),
    )


class _Integral:
    """Running logs, one for each pair: the sum, its error, the largest panel and exponent seen."""

    def __init__(self, beta: float, rate: float, orders: Array, shifts: Array) -> None:
        self.beta, self.rate, self.orders, self.shifts = beta, rate, orders, shifts
        self.total = np.full(len(orders), -np.inf)
        self.error = np.full(len(orders), -np.inf)
        self.peak = np.full(len(orders), -np.inf)
        self.exponent = np.zeros(len(orders))

    def log_upper(self) -> Array:
        """The logs of the integrals with every error added."""
        panels = self._layout()
        for _ in range(_ROUNDS):
            panels = self._absorb(panels)
            if not 0 < len(panels.owner) <= _LONGEST:
                break
            panels = panels.halves()
        self.error[panels.owner] = np.inf
        # a sum of positive terms; an exponent E is off by a few units of E
        rounding = 1e-12 + 32 * UNIT * self.exponent
        upper: Array = np.logaddexp(self.total, self.error) + rounding
        return upper

    def _of(self, owner: _Index, side: Array) -> Integrand:
        return Integrand(self.beta, self.rate, self.orders[owner], self.shifts[owner], side)

    def _layout(self) -> _Panels:
        """Panels that double away from the kink; what they leave out goes into the error."""
        everyone = np.arange(len(self.orders))
        right, left = (np.full(len(everyone), side) for side in (1.0, -1.0))
        steep = 1 + self.orders * self.beta * self.shifts ** (self.beta - 1)
        start = 2.0**-17 * np.minimum(self.shifts, 1 / steep)
        # L, and with it the weight, is largest at the kink on the left of it, and grows to its right
        integrand = self._of(everyone, right)
        nearby = np.maximum(integrand.growth(start), self.shifts**self.beta)
        self.error = integrand.log_weight(nearby) + np.log(2 * start)
        parts = []
        edge, owner = start, everyone
        while len(owner):
            upper = np.minimum(2 * edge, self.shifts[owner] / 2)
            parts.append(_Panels(owner, left[owner], edge, upper))
            on = upper < self.shifts[owner] / 2
            edge, owner = upper[on], owner[on]
        edge, owner = start, everyone
        while len(owner):
            parts.append(_Panels(owner, right[owner], edge, 2 * edge))
            edge = 2 * edge
            integrand = self._of(owner, right[owner])
            np.maximum.at(self.peak, owner, integrand.log_value(edge) + np.log(edge / 2))
            tail = integrand.log_tail(edge)
            ended = (tail <= self.peak[owner] + _LOG_NEGLIGIBLE) | ~np.isfinite(edge**self.beta)
            tail = np.where(np.isfinite(edge**self.beta), tail, np.inf)
            self.error[owner[ended]] = np.logaddexp(self.error[owner[ended]], tail[ended])
            edge, owner = edge[~ended], owner[~ended]
        merged = _joined(parts)
        return merged.take(np.isfinite(self.error[merged.owner]))

    def _absorb(self, panels: _Panels) -> _Panels:
        """Integrate or dismiss the panels that can be; return the others."""
        owner = panels.owner
        integrand = self._of(owner, panels.side)
        middle, half = (panels.low + panels.high) / 2, (panels.high - panels.low) / 2
        centre = integrand.log_value(middle) + np.log(2 * half)
        np.maximum.at(self.peak, owner, centre)
        exponent = integrand.order * integrand.growth(middle) + middle**self.beta
        np.maximum.at(self.exponent, owner, np.where(centre > self.peak[owner] - 40, exponent, 0.0))
        largest = integrand.log_largest(middle, _REACH * half)
        whole, slip = largest + np.log(2 * half), largest + np.log(half) + _LOG_GAUSS
        dismissed = whole <= self.peak[owner] + _LOG_NEGLIGIBLE
        done = ~dismissed & (slip <= self.peak[owner] + _LOG_TOLERANCE)
        _add(self.error, owner[dismissed], whole[dismissed])
        _add(self.error, owner[done], slip[done])
        _add(self.total, owner[done], self._gauss(panels.take(done)))
        return panels.take(~(dismissed | done))

    def _gauss(self, panels: _Panels) -> Array:
        """The logs of the panels' integrals."""
        half = (panels.high - panels.low)[:, None] / 2
        u = (panels.low + panels.high)[:, None] / 2 + half * _NODES
        order, shift = self.orders[panels.owner][:, None], self.shifts[panels.owner][:, None]
        integrand = Integrand(self.beta, self.rate, order, shift, panels.side[:, None])
        return log_sum_exp(integrand.log_value(u) + np.log(half * _WEIGHTS))


def _add(logs: Array, owner: _Index, terms: Array) -> None:
    """Add exp(terms) to their owners' sums, in logs."""
    np.logaddexp.at(logs, owner, terms)
