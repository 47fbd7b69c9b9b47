"""Random allocation: privacy loss of an epoch in which each record takes part in one of its steps.

The likelihood ratio of an epoch is a mean of independent log-normal variables. Its law is computed from
both sides on grids with equal ratios between neighbouring points.

Proofs: docs/guarantees/random-allocation.md.
"""

import math
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from scipy.special import erf, ndtr, ndtri_exp

from hush.accounting.numerics import OUTWARD, UNIT, Array
from hush.accounting.pld.privacy_loss import Direction, Step

MAX_MULTIPLIER = 50.0
"""Largest noise of an `AllocationLaw`; with more, its grid would take seconds to minutes."""
MIN_MULTIPLIER = 0.1
"""Least noise of an `AllocationLaw`; with less, its grid would be long and values would overflow."""
# Mass that a sum may lose at either end of its grid.
_TRIMMED = 1e-25
# Largest deviation of the noise of one term on its grid; the mass beyond is about 1e-25.
_REACH = 10.4
# Width of the last grid, relative to the standard deviation of the ratio, and the largest width.
_RESOLUTION, _MAX_WIDTH = 0.025, 0.01
# Logarithm of the ratio of two values above which the smaller one is below the rounding of the larger.
_FAR = 42.0
# Doublings of the number of terms per halving of the grid width.
_DOUBLINGS = 3
_GAUSS: tuple[Array, Array] = np.polynomial.legendre.leggauss(8)
_NODES, _WEIGHTS = (1 + _GAUSS[0]) / 2, _GAUSS[1] / 2


@dataclass(frozen=True)
class AllocationLaw(Step):
    """An epoch of `steps` steps in which a record takes part in one step, drawn uniformly.

    Its likelihood ratio is discretised from above (`pessimistic`), which dominates the epoch, or from
    below, which the epoch dominates. An outcome is a log-likelihood ratio.
    """

    steps: int
    multiplier: float
    pessimistic: bool

    @property
    def total_variation(self) -> float:
        # of one full step, which dominates the epoch, or of the discrete law
        whole = float(erf(1 / self.multiplier / math.sqrt(8)))
        if not self.pessimistic:
            return min(1.0, whole * OUTWARD)
        law = _law(self)
        gains = np.maximum(law.with_record - law.without, 0.0)
        distance = float(gains.sum() + law.infinite) * (1 + law.rounding) + 1e-13
        return min(1.0, whole * OUTWARD, distance * OUTWARD)

    @property
    def loss_rounding(self) -> float:
        # the shares of a split, by the length of its sums; a draw of 62 bits is not exactly uniform
        reach = 2 * (_REACH + 1 / self.multiplier) / self.multiplier + math.log(2 * self.steps)
        per_sum = (16 + 4 * reach) * UNIT
        return 64 * UNIT + 2 * math.log2(2 * self.steps) * per_sum + self.steps * 2.0**-61

    @property
    def ratio_range(self) -> tuple[float, float]:
        return -math.inf, math.inf

    def log_ratio(self, outcomes: Array) -> Array:
        return outcomes

    def outcome_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        law = _law(self)
        first = law.with_record if direction is Direction.REMOVE else law.without
        low = int(np.searchsorted(np.cumsum(first), tail / 2))
        high = len(first) - 1 - int(np.searchsorted(np.cumsum(first[::-1]), tail / 2))
        return float(law.losses[min(low, high)]), float(law.losses[max(low, high)])

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        law, (low, high) = _law(self), self.outcome_quantiles(direction, tail)
        used = (law.losses >= low) & (law.losses <= high)
        masses = law.with_record if direction is Direction.REMOVE else law.without
        used &= masses > 0
        return self.privacy_loss(direction, law.losses[used]), np.log(masses[used])

    def _outcome_masses(self, direction: Direction, ratios: Array) -> tuple[Array, Array, Array]:
        law, forward = _law(self), direction is Direction.REMOVE
        cells = np.searchsorted(ratios, law.losses)
        with_record, without = np.zeros(len(ratios) + 1), np.zeros(len(ratios) + 1)
        np.add.at(with_record, cells, law.with_record)
        np.add.at(without, cells, law.without)
        if self.pessimistic:
            with_record[-1] += law.infinite
            without[0] += law.absent
        # the rounding of the law: outward for a pessimistic law, inward for the other one
        first, second = (with_record, without) if forward else (without, with_record)
        first *= 1 + law.rounding if self.pessimistic else 1 - law.rounding
        second *= 1 + law.rounding
        return with_record, without, np.full(len(ratios), 2 * UNIT * len(law.losses))


@dataclass(frozen=True, eq=False)
class _RatioLaw:
    """Increasing log-likelihood ratios, and the masses of both laws."""

    losses: Array
    with_record: Array
    without: Array
    infinite: float
    """Mass of the law with the record at an infinite ratio."""
    absent: float
    """Mass of the law without the record at a ratio of zero."""
    rounding: float


@lru_cache(maxsize=16)
def _law(step: AllocationLaw) -> _RatioLaw:
    total = _law_of_sum(step.steps, step.multiplier, step.pessimistic)
    used = (total.masses > 0) & (total.moments > 0)
    without, with_record = total.masses[used], total.moments[used] / step.steps
    losses = np.log(with_record / without)
    order = np.argsort(losses, kind="stable")
    return _RatioLaw(
        losses[order],
        with_record[order],
        without[order],
        total.deficit / step.steps * OUTWARD,
        total.absent * OUTWARD,
        total.rounding,
    )


@dataclass(frozen=True, eq=False)
class _Sum:
    """Law of a sum of likelihood ratios, in cells k with places near exp(k * width)."""

    first: int
    width: float
    masses: Array
    moments: Array
    """First moment of each cell. In a pessimistic law it is the mass times exp(k * width)."""
    pessimistic: bool
    absent: float = 0.0
    """Mass at zero."""
    deficit: float = 0.0
    """Upper bound on the decrease of the mean, which is mass at an infinite loss with the record."""
    rounding: float = 0.0
    """Bound on the relative rounding error of each mass and moment."""


def _term(steps: int, multiplier: float, width: float, *, pessimistic: bool) -> _Sum:
    """The law of one of `steps` ratios exp((2x - 1) / (2 s^2)), x ~ N(0, s^2)."""
    # below, values are negligible, and it is nearly impossible that all ratios are there
    lowest = max(-_REACH, float(ndtri_exp(math.log(_TRIMMED) / steps)))
    lowest = min((lowest - 0.5 / multiplier) / multiplier, math.log(width))
    lowest = max(lowest, (-_REACH - 0.5 / multiplier) / multiplier)
    highest = (_REACH + 0.5 / multiplier) / multiplier
    first = math.floor(lowest / width)
    count = math.ceil(highest / width) - first
    points = (first + np.arange(count + 1)) * width
    # noise / s at the nodes of each cell, and the share of their mass that moves up
    inner = width * _NODES
    outcomes = multiplier * (points[:-1, None] + inner) + 0.5 / multiplier
    masses = np.exp(-(outcomes**2) / 2) * (multiplier * width / math.sqrt(2 * math.pi) * _WEIGHTS)
    bottom = multiplier * points[0] + 0.5 / multiplier
    top = multiplier * points[-1] + 0.5 / multiplier
    below, below_moment = float(ndtr(bottom)), float(ndtr(bottom - 1 / multiplier))
    above, above_moment = float(ndtr(-top)), float(ndtr(1 / multiplier - top))
    rounding = (256 + 8 * _REACH * (_REACH + 1 / multiplier)) * UNIT
    if not pessimistic:
        mass = np.concatenate([[below], masses.sum(axis=1), [above]])
        moment = (masses * np.exp(inner)).sum(axis=1) * np.exp(points[:-1])
        moment = np.concatenate([[below_moment], moment, [above_moment]])
        return _Sum(first - 1, width, mass, moment, pessimistic, rounding=rounding)
    law = np.zeros(count + 1)
    law[:-1] += (masses * (np.exp(inner) * np.expm1(width - inner) / math.expm1(width))).sum(axis=1)
    law[1:] += (masses * (np.expm1(inner) / math.expm1(width))).sum(axis=1)
    # mass below the grid moves to zero and to the lowest point; mass above it to the highest point
    law[0] += below_moment * math.exp(-points[0])
    absent = below * (1 + rounding) - below_moment * math.exp(-points[0])
    law[-1] += above
    return _Sum(
        first, width, law, law * np.exp(points), pessimistic, max(absent, 0.0), above_moment, rounding
    )


def _add(one: _Sum, other: _Sum, refined: int) -> _Sum:
    """The law of a sum of two independent sums of one width, on a grid `refined` times as fine."""
    same = one is other
    first = min(one.first, other.first)
    length = max(one.first + len(one.masses), other.first + len(other.masses)) - first
    a, b = _aligned(one, first, length), _aligned(other, first, length)
    width = one.width / refined
    size = refined * (length - 1) + math.ceil(math.log(2) / width) + 2
    masses, moments = np.zeros(size), np.zeros(size)
    for x, y in [(a, b)] if same else [(a, b), (b, a)]:
        part = _pair(x, y, width, refined, size, one.pessimistic)
        masses += part[0] * (1 + same)
        moments += part[1] * (1 + same)
    if one.pessimistic:
        shifted = one.absent * b[0] + other.absent * a[0]
        masses[: refined * length : refined] += shifted
    rounding = one.rounding + other.rounding + (4 * length + 64) * UNIT
    absent, deficit = one.absent * other.absent, one.deficit + other.deficit
    total = _Sum(refined * first, width, masses, moments, one.pessimistic, absent, deficit, rounding)
    return _trimmed(total)


def _aligned(law: _Sum, first: int, length: int) -> tuple[Array, Array]:
    """Masses and moments on a common range of cells."""
    pads = law.first - first, length - len(law.masses) - (law.first - first)
    return np.pad(law.masses, pads), np.pad(law.moments, pads)


def _pair(
    x: tuple[Array, Array], y: tuple[Array, Array], width: float, refined: int, size: int, spread: bool
) -> tuple[Array, Array]:
    """Contribution of the pairs of cells (i, i - d), d >= 0, with half the weight at d = 0.

    The sum of points i and i - d is at i + log(1 + exp(-d h)) / h: this offset does not depend on i.
    """
    length, masses, moments = len(x[0]), np.zeros(size), np.zeros(size)
    far = min(length, math.ceil(_FAR / (width * refined)))
    offsets = np.log1p(np.exp(-np.arange(far) * (width * refined))) / width
    cells = np.floor(offsets if spread else offsets + 0.5).astype(int)
    weights = np.ones(far)
    weights[0] = 0.5
    shares = np.clip(np.expm1((offsets - cells) * width) / math.expm1(width), 0.0, 1.0)
    # offsets decrease with the gap: groups of gaps with the same offset in cells
    starts = np.flatnonzero(np.diff(cells, prepend=-1)).tolist()
    for start, end in zip(starts, [*starts[1:], far], strict=True):
        cell, weight, used = int(cells[start]), weights[start:end], slice(start, length)
        places = slice(cell + refined * start, cell + refined * (length - 1) + 1, refined)
        mass = _windows(y[0], weight, start)
        if spread:
            moved = _windows(y[0], weight * shares[start:end], start)
            masses[places] += x[0][used] * np.maximum(mass - moved, 0.0)
            masses[places.start + 1 : places.stop + 1 : refined] += x[0][used] * moved
        else:
            masses[places] += x[0][used] * mass
            moments[places] += x[1][used] * mass + x[0][used] * _windows(y[1], weight, start)
    if far < length:
        # the smaller value is below the rounding of the larger one
        places, used = slice(refined * far, refined * (length - 1) + 1, refined), slice(far, length)
        mass, moment = (np.cumsum(part[: length - far]) for part in y)
        masses[places] += x[0][used] * mass
        moments[places] += x[1][used] * mass + x[0][used] * moment
    return masses, moments


def _windows(law: Array, kernel: Array, start: int) -> Array:
    """sum_d kernel[d - start] law[i - d] for i from `start`."""
    length = len(law) - start
    return np.convolve(law[:length], kernel)[:length]


def _trimmed(law: _Sum) -> _Sum:
    """The law without the negligible ends of its grid."""
    masses, moments, deficit, absent = law.masses, law.moments, law.deficit, law.absent
    if law.pessimistic:
        points = np.exp((law.first + np.arange(len(masses))) * law.width)
        moments = masses * points
    mean = float(moments.sum())
    low = int(np.searchsorted(np.cumsum(masses), _TRIMMED))
    above = np.cumsum(moments[::-1])[::-1]
    high = max(low + 1, int(np.count_nonzero(above > _TRIMMED * mean)))
    kept, kept_moments = masses[low:high].copy(), moments[low:high].copy()
    if law.pessimistic:
        # lower values: to zero, and to the highest point
        absent += float(masses[:low].sum())
        deficit += float(moments[:low].sum() + moments[high:].sum())
        kept[-1] += masses[high:].sum()
        kept_moments[-1] = kept[-1] * points[high - 1]
    else:
        kept[0] += masses[:low].sum()
        kept_moments[0] += moments[:low].sum()
        kept[-1] += masses[high:].sum()
        kept_moments[-1] += moments[high:].sum()
    return replace(
        law, first=law.first + low, masses=kept, moments=kept_moments, absent=absent, deficit=deficit
    )


def _law_of_sum(steps: int, multiplier: float, pessimistic: bool) -> _Sum:
    """The law of the sum of `steps` ratios."""
    log_variance = multiplier**-2 + math.log(-math.expm1(-(multiplier**-2))) - math.log(steps)
    width = _MAX_WIDTH if log_variance > 0 else min(_MAX_WIDTH, _RESOLUTION * math.exp(log_variance / 2))
    # numbers of terms per level, at most two, from the last sum to single terms
    needed = [{steps}]
    while max(needed[-1]) > 1:
        needed.append({half for each in needed[-1] for half in (each // 2, each - each // 2)} - {0})
    levels = len(needed) - 1
    refined = [1 + (level % _DOUBLINGS == _DOUBLINGS - 1) for level in range(levels)]
    width *= math.prod(refined)
    laws = {1: _term(steps, multiplier, width, pessimistic=pessimistic)}
    for level in reversed(range(levels)):
        before, width = laws, width / refined[level]
        laws = {
            each: _add(before[each // 2], before[each - each // 2], refined[level])
            if each > 1
            else _term(steps, multiplier, width, pessimistic=pessimistic)
            for each in needed[level]
        }
    return laws[steps]
