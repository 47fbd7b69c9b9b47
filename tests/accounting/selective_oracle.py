"""Selective trials computed from their laws: no corners, no chords, no log space.

A trial is given by functions of the proposal: the chance of acceptance without the record, and with
the record in the test batch. The proposal is one number, x or N(0, s^2) moved by one with chance q.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import mpmath
import numpy as np
import numpy.typing as npt
from scipy.stats import norm

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    rate: float
    deviation: float
    test_rate: float
    test_deviation: float
    threshold: float

    @property
    def accept(self) -> tuple[float, float]:
        low, high = norm.cdf((np.array([-0.5, 0.5]) + self.threshold) / self.test_deviation)
        return float(low), float(high)


def proposals(case: Case, points: int = 20_000, reach: float = 12.0) -> tuple[Array, Array, Array]:
    """Outcomes, and their masses without and with the record, by the midpoint rule."""
    x = np.linspace(-reach * case.deviation, 1 + reach * case.deviation, points)
    without = norm.pdf(x, 0, case.deviation)
    shifted = norm.pdf(x, 1, case.deviation)
    with_record = (1 - case.rate) * without + case.rate * shifted
    return x, without / without.sum(), with_record / with_record.sum()


def moment(first: Array, second: Array, order: float) -> float:
    some = (first > 0) & (second > 0)
    logs = order * np.log(first[some]) + (1 - order) * np.log(second[some])
    return float(np.exp(np.logaddexp.reduce(logs)))


def trial_divergences(
    case: Case, without: Array, with_record: Array, order: float
) -> tuple[float, float]:
    """Both divergences of one public trial: acceptance without the record and with it in the test."""
    _, q, p = proposals(case, len(without))
    a = (1 - case.test_rate) * without + case.test_rate * with_record
    first = np.append(a * p, 1 - (a * p).sum())
    second = np.append(without * q, 1 - (without * q).sum())
    return (
        math.log(moment(first, second, order)) / (order - 1),
        math.log(moment(second, first, order)) / (order - 1),
    )


def accepted_divergences(
    case: Case, without: Array, with_record: Array, order: float
) -> tuple[float, float]:
    """Both divergences of the accepted proposal, however many trials it took."""
    _, q, p = proposals(case, len(without))
    a = (1 - case.test_rate) * without + case.test_rate * with_record
    first, second = a * p / (a * p).sum(), without * q / (without * q).sum()
    return (
        math.log(moment(first, second, order)) / (order - 1),
        math.log(moment(second, first, order)) / (order - 1),
    )


def page_bound(case: Case, order: float, present: bool) -> float:
    """The per-trial bound of docs/guarantees/selective.md in one direction, integrated with mpmath."""
    mp = mpmath.mp
    q, s, w = mp.mpf(case.rate), mp.mpf(case.deviation), mp.mpf(case.test_rate)
    a = mp.mpf(order)
    m, top = (
        mp.ncdf((mp.mpf(case.threshold) + side) / mp.mpf(case.test_deviation))
        for side in (-mp.mpf(1) / 2, mp.mpf(1) / 2)
    )

    def g(y: mpmath.mpf) -> mpmath.mpf:
        return y**a - 1 - a * (y - 1)

    corners = [(u, (1 - w) * u + w * b) for u in (m, top) for b in (m, top)]

    def density(x: mpmath.mpf, rho: mpmath.mpf) -> mpmath.mpf:
        return mp.npdf(x, 0, s) * (1 if present else rho)

    def ratio(x: mpmath.mpf) -> mpmath.mpf:
        return 1 - q + q * mp.exp((2 * x - 1) / (2 * s * s))

    def largest(term: Callable[[mpmath.mpf, mpmath.mpf], mpmath.mpf]) -> mpmath.mpf:
        """E of the largest corner of term(t, rho k), integrated between the places where it changes."""

        def values(x: mpmath.mpf) -> list[mpmath.mpf]:
            rho = ratio(x)
            return [term(u, rho * v / u) if present else term(v, u / v / rho) for u, v in corners]

        def best(x: mpmath.mpf) -> int:
            heights = values(x)
            return heights.index(max(heights))

        cuts = mp.linspace(-10 * s + min(0, 1 - a), 10 * s + a, 31)
        fine = mp.linspace(cuts[0], cuts[-1], 301)
        for low, high in pairwise(fine):
            left = best(low)
            if left != best(high):
                for _ in range(45):
                    middle = (low + high) / 2
                    low, high = (middle, high) if best(middle) == left else (low, middle)
                cuts.append(high)
        cuts.sort()
        return mp.quad(lambda x: density(x, ratio(x)) * max(values(x)), cuts, maxdegree=3)

    inside = largest(lambda t, y: t * g(y))
    rise = largest(lambda t, y: t * (y - 1))
    fall = largest(lambda t, y: t * (1 - y))
    rejection = 1 - top
    return float(
        mp.log1p(
            inside
            + max(
                (rejection + rise) * g(rejection / (rejection + rise)),
                rejection * g(1 + fall / rejection),
            )
        )
        / (a - 1)
    )
