"""A law that dominates coordinate-sampled Gaussian noise if few coordinates may carry the norm.

Large coordinates have their own likelihood ratios, and all small ones share a jump diffusion. The
largest hockey-stick curve over all allocations is a dominating curve:
docs/guarantees/twice-sampling-pld.md, section 9.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from hush.accounting.numerics import OUTWARD, UNIT, Array, log_mixture_ratio_absolute
from hush.accounting.pld.jump_diffusion import (
    KILLING,
    JumpDiffusion,
    JumpDiffusionLaw,
    best_jump,
    dominating_diffusion,
    rounded_shift,
)
from hush.accounting.pld.lattice import Lattice, pessimistic
from hush.accounting.pld.laws import GaussianLaw
from hush.accounting.pld.privacy_loss import Direction, SampledPair, Step, noise_masses

# Number of shares of the squared norm; coordinates with at most `_SMALL` shares are small.
_SHARES, _SMALL = 24, 5
# Width of the grid of log-likelihood ratios, and the mass beyond it.
_WIDTH, _TAIL = 0.01, 1e-18
# Smallest and largest norm, and smallest entry relative to the norm, of a table.
_MIN_NORM, _MAX_NORM, _LEAST_ENTRY = 0.05, 3.0, 0.45
# Exceeds the relative rounding of a convolution of positive terms on the grid.
_UPWARD = 1 + 1e-11


@dataclass(frozen=True)
class _Coordinate(SampledPair):
    """One coordinate that takes part with probability `rate`; `scale` is the noise over its change."""

    scale: float

    @property
    def noise(self) -> GaussianLaw:
        return GaussianLaw(self.scale)

    def with_scale(self, scale: float) -> "_Coordinate":
        return _Coordinate(self.rate, scale)

    def with_representable_loss(self) -> "_Coordinate":
        return self


@dataclass(frozen=True, eq=False)
class Table:
    """Likelihood ratios exp(`logs`) without record sampling, with their masses without the record."""

    logs: Array
    masses: Array
    infinite_mass: float
    """Mass of infinite ratios, with the record."""


@lru_cache(maxsize=64)
def allocation_table(coordinate_rate: float, entry: float, norm: float) -> Table | None:
    """A law above the likelihood ratio of every change with these largest entry and norm, or None.

    `entry` and `norm` are in units of the noise.
    """
    total, cap = norm**2 * OUTWARD, min(entry, norm) ** 2 * OUTWARD
    share = total / _SHARES
    # rounded up, to reuse certificates
    small = rounded_shift(math.sqrt(min(_SMALL * share, cap) * OUTWARD))
    diffusion = dominating_diffusion(coordinate_rate, small, best_jump(coordinate_rate, small))
    if diffusion is None:
        return None
    top = math.ceil((9 * norm + total / 2 + 1) / _WIDTH)
    places = np.arange(-top, top + 1, dtype=float)
    # the last number of shares of a coordinate at the cap
    most = min(_SHARES, math.ceil(cap / share))
    large = {
        count: pessimistic(
            _Coordinate(coordinate_rate, 1 / math.sqrt(min(count * share, cap) * OUTWARD)),
            Direction.REMOVE,
            _WIDTH,
            _TAIL,
        )
        for count in range(_SMALL + 1, most + 1)
    }
    curves: list[Array] = [np.maximum(-np.expm1(places * _WIDTH), 0.0)]
    for shares in range(1, _SHARES + 1):
        curve = _diffusion_curve(diffusion, shares * share * OUTWARD, places)
        for count, lattice in large.items():
            # the coordinate has more than count - 1 shares
            if count - 1 <= shares:
                curve = np.maximum(curve, _with_coordinate(lattice, curves[shares - count + 1]))
        curves.append(curve)
    return _tabulate(np.asarray(places * _WIDTH), curves[-1])


def _diffusion_curve(diffusion: JumpDiffusion, size: float, places: Array) -> Array:
    """Hockey-stick curve of the jump diffusion at `size`, at ratios exp(places * width)."""
    jumps = ((1, size * diffusion.intensity),)
    law = JumpDiffusionLaw(1.0, size * diffusion.variance, diffusion.jump, jumps, KILLING * size)
    lattice = pessimistic(law, Direction.REMOVE, _WIDTH, _TAIL)
    index = lattice.first - int(places[0]) + np.arange(len(lattice.masses))
    inside = index < len(places)
    first = np.zeros(len(places))
    # a larger ratio is pessimistic
    np.add.at(first, np.maximum(index[inside], 0), lattice.masses[inside])
    ratios = np.exp(places * _WIDTH)
    above, second = (np.cumsum(law[::-1])[::-1] for law in (first, first / ratios))
    infinite = lattice.infinite_mass + float(lattice.masses[~inside].sum())
    return np.asarray((np.maximum(above - ratios * second, 0.0) + infinite) * _UPWARD)


def _with_coordinate(lattice: Lattice, curve: Array) -> Array:
    """Curve of a product: the mean of the curve at ratios divided by the coordinate's."""
    last = lattice.first + len(lattice.masses) - 1
    # a curve is at most 1, and does not increase
    below, above = max(last, 0), max(-lattice.first, 0)
    extended = np.concatenate([np.ones(below), curve, np.full(above, curve[-1])])
    means = np.convolve(lattice.masses, extended)
    start = below - lattice.first
    return np.asarray((means[start : start + len(curve)] + lattice.infinite_mass) * _UPWARD)


def _tabulate(logs: Array, curve: Array) -> Table:
    """The discrete law whose curve is the convex minorant of the points, and (0, 1)."""
    ratios = np.append(0.0, np.exp(logs))
    curve = np.append(1.0, np.maximum(curve, -np.expm1(logs)))
    kept, slopes = [0], [-1.0]
    for place in range(1, len(ratios)):
        slope = (curve[place] - curve[kept[-1]]) / (ratios[place] - ratios[kept[-1]])
        while len(kept) > 1 and slope <= slopes[-1]:
            kept.pop()
            slopes.pop()
            slope = (curve[place] - curve[kept[-1]]) / (ratios[place] - ratios[kept[-1]])
        kept.append(place)
        slopes.append(float(slope))
    masses = np.maximum(np.diff(np.append(slopes, 0.0)), 0.0)
    return Table(np.append(-np.inf, logs)[kept], masses, float(curve[-1]))


# Number of cells of each coordinate, and their reach in units of the noise.
_CELLS, _REACH = 300, 9.0
# Moves a change inward by more than its rounding.
_INWARD = 1 - 1e-9


@lru_cache(maxsize=64)
def two_coordinates(coordinate_rate: float, entry: float, norm: float) -> Table:
    """The law of a change of one coordinate by `entry` and another by the rest, observed in cells."""
    first, second = np.ones(1), np.ones(1)
    for change in (entry, math.sqrt(max(norm**2 - entry**2, 0.0))):
        cuts = np.linspace(-_REACH, _REACH + change, _CELLS)
        without = noise_masses(GaussianLaw(1.0), cuts)
        moved = noise_masses(GaussianLaw(1.0), cuts - change * _INWARD)
        mixed = (1 - coordinate_rate) * without + coordinate_rate * moved
        first, second = np.outer(first, mixed).ravel(), np.outer(second, without).ravel()
    used = second > 1e-200
    logs = np.log(first[used] / second[used])
    order = np.argsort(logs)
    return Table(logs[order], second[used][order], 0.0)


@dataclass(frozen=True)
class CoordinateAllocationLaw(Step):
    """Likelihood ratios of a `Table` of a record that takes part with probability `rate`."""

    rate: float
    coordinate_rate: float
    entry: float
    norm: float
    attained: bool = False
    """Whether the law is of `two_coordinates`, for a lower bound, instead of all allocations."""

    @property
    def _table(self) -> Table:
        if self.attained:
            return two_coordinates(self.coordinate_rate, self.entry, self.norm)
        table = allocation_table(self.coordinate_rate, self.entry, self.norm)
        assert table is not None
        return table

    @property
    def log_chi_square(self) -> float:
        """log-moment of order 2, without sampling of records and infinite losses."""
        table = self._table
        return float(np.log(table.masses @ np.exp(2 * table.logs)))

    @property
    def sampled_log_chi_square(self) -> float:
        """Logarithm of the chi-square divergence of the sampled record."""
        return 2 * math.log(self.rate) + math.log(math.expm1(self.log_chi_square))

    @property
    def total_variation(self) -> float:
        table = self._table
        distance = table.masses @ np.maximum(np.expm1(table.logs), 0.0) + table.infinite_mass
        return min(1.0, self.rate * float(distance) * OUTWARD)

    @property
    def loss_rounding(self) -> float:
        # the masses of cells have an error of 2000 units each
        return 1e-12 if self.attained else 64 * UNIT * (1 + float(self._table.logs[-1]))

    @property
    def ratio_range(self) -> tuple[float, float]:
        return (math.log1p(-self.rate) if self.rate < 1 else -math.inf), math.inf

    @property
    def centre(self) -> float:  # type: ignore[override]
        return float(self._table.logs[int(np.argmax(self._table.masses))])

    def log_ratio(self, outcomes: Array) -> Array:
        with np.errstate(divide="ignore"):
            return log_mixture_ratio_absolute(self.rate, outcomes)

    def _laws(self) -> tuple[Array, Array, Array]:
        """Log-ratios of a sampled record, and their masses with and without it."""
        table = self._table
        with_record = table.masses * (1 - self.rate + self.rate * np.exp(table.logs))
        return self.log_ratio(table.logs), with_record, table.masses

    def outcome_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        _, with_record, without = self._laws()
        law = with_record if direction is Direction.REMOVE else without
        finite = self._table.logs > -math.inf
        inner = finite & (np.cumsum(law) > tail) & (np.cumsum(law[::-1])[::-1] > tail)
        places = self._table.logs[inner if inner.any() else finite]
        # the next places on the grid cover the rest
        return float(places[0]) - _WIDTH, float(places[-1]) + _WIDTH

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        logs, with_record, without = self._laws()
        low, high = self.outcome_quantiles(direction, tail)
        law = with_record if direction is Direction.REMOVE else without
        used = (self._table.logs >= low) & (self._table.logs <= high) & (law > 0)
        return logs[used] * (1 if direction is Direction.REMOVE else -1), np.log(law[used])

    def _outcome_masses(self, direction: Direction, ratios: Array) -> tuple[Array, Array, Array]:
        logs, with_record, without = self._laws()
        cells = np.searchsorted(ratios, logs)
        first, second = (
            np.asarray(np.bincount(cells, law, minlength=len(ratios) + 1), dtype=float)
            for law in (with_record, without)
        )
        first[-1] += self.rate * self._table.infinite_mass
        return first, second, np.full(len(ratios), 4 * UNIT * (len(logs) + 4000))


def dominating_allocation(
    rate: float, coordinate_rate: float, entry: float, norm: float
) -> CoordinateAllocationLaw | None:
    """A step that dominates coordinate-sampled Gaussian noise on one block, or None.

    `entry` is the largest change of a coordinate and `norm` the l2 sensitivity, in units of the noise.
    None if many coordinates are needed for the norm, where a jump diffusion alone is tight.

    **Guarantee.** In both directions the step's hockey-stick divergence is at least the mechanism's, at
    every epsilon: docs/guarantees/twice-sampling-pld.md, section 9.
    """
    if norm > _MAX_NORM or norm < _MIN_NORM or entry < _LEAST_ENTRY * norm:
        return None
    if allocation_table(coordinate_rate, entry, norm) is None:
        return None
    return CoordinateAllocationLaw(rate, coordinate_rate, entry, norm)


def dominated_allocation(
    rate: float, coordinate_rate: float, entry: float, norm: float
) -> CoordinateAllocationLaw | None:
    """A step that a change of two coordinates dominates, for lower bounds, or None.

    None if two coordinates cannot carry the norm, or one can.
    """
    if not norm / math.sqrt(2) <= entry < norm * _INWARD or not _MIN_NORM <= norm <= _MAX_NORM:
        return None
    return CoordinateAllocationLaw(rate, coordinate_rate, entry, norm, attained=True)
