"""The least concave majorant of y -> h(y^(1/p)) at one point, between rigorous bounds.

h is convex in the shift s = y^(1/p), so between two grid points it lies below its chord in s. As a
function of y the chord is concave (p >= 1), so it lies below its tangents at both ends. The polygon
through the grid points and the tangents' crossings therefore majorises h, and its own concave
majorant is an upper bound; that of the grid points alone is a lower bound.
docs/guarantees/coordinate-wise.md, "On a grid".
"""

import math

import numpy as np
import numpy.typing as npt

from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.rdp.profile import CoordinateRDP

_FIRST_RATIO = 1.6


class ConcaveMajorant:
    """A grid of shifts for one order, what they cost, and the majorant's value at y = `at`.

    `at` = 0 asks for its slope at 0 instead, which is what unlimited coordinates cost per budget.
    """

    def __init__(
        self, p: float, at: float, shifts: Array, first: float, order: float, bend: float
    ) -> None:
        self.p, self.at, self.shifts = p, at, shifts
        # exp((order - 1) h) has a second derivative of at least `bend`
        self.order, self.bend = order, bend
        # what the shifts below the first grid point cost at most, at that point
        self.first = first
        self.known = np.zeros(0)
        self.costs = np.zeros(0)

    @classmethod
    def start(
        cls, profile: CoordinateRDP, p: float, top: float, at: float, order: float
    ) -> "ConcaveMajorant":
        """A coarse grid from where the profile is quadratic up to `top`."""
        alike = at ** (1 / p)
        low = top if profile.quadratic and p <= 2 else min(top, profile.nearly_quadratic(order))
        if p > 2 and at > 0:
            low = min(low, 0.005 * alike)
        steps = max(1, math.ceil(math.log(top / low) / math.log(_FIRST_RATIO)))
        grid = np.geomspace(low, top, steps + 1) if low < top else np.array([top])
        grid[-1] = top
        if low < alike < top:
            grid = np.unique(np.append(grid, alike))
        rise = profile.curvature(np.array([order]), np.array([low]))[0] * low**2
        # in y = s^p a parabola in s is concave from p = 2 on
        bend = profile.least_bend(order, top) if p >= 2 else 0.0
        return cls(p, at, grid, float(rise), order, bend)

    def learn(self, shifts: Array, costs: Array) -> None:
        """Take in what these shifts cost."""
        every = np.concatenate([self.known, shifts])
        position = np.argsort(every)
        self.known, self.costs = every[position], np.concatenate([self.costs, costs])[position]

    def upper(self) -> float:
        """No less than the majorant."""
        x, value, _ = self._vertices()
        points = np.concatenate([[0.0], self._powers(), x])
        heights = np.concatenate([[self._origin()], self._raised(), value])
        return self._hull(points, heights)[0]

    def touching(self) -> tuple[float, float]:
        """The shifts on either side of `at` whose mixture attains the majorant on the grid."""
        _, left, right = self._hull(*self._grid())
        return left ** (1 / self.p), right ** (1 / self.p)

    def wanted(self, tolerance: float) -> Array:
        """Shifts that would bring the bounds together; none where they are, relatively."""
        level, left, right = self._hull(*self._grid())
        if not np.isfinite(self.costs).all():
            return np.zeros(0)
        points, heights = self._grid()
        at_left = heights[np.searchsorted(points, left)]
        at_right = heights[np.searchsorted(points, right)]
        x, value, cell = self._vertices()
        if self.at == 0:
            line = level * x * (1 + tolerance)
        else:
            slope = (at_right - at_left) / (right - left) if right > left else self._support(level)
            line = level * (1 + tolerance) + slope * (x - self.at)
        far = cell[value > line]
        between: Array = np.sqrt(self.known[far] * self.known[far + 1])
        return between

    def _support(self, level: float) -> float:
        """The slope of a line through (at, level) above the grid, where the grid touches at `at`."""
        points, heights = self._grid()
        beyond = points > self.at
        if beyond.any():
            return float(((heights[beyond] - level) / (points[beyond] - self.at)).max())
        before = points < self.at
        return float(((level - heights[before]) / (self.at - points[before])).min())

    def _origin(self) -> float:
        # for p <= 2 the quadratic bound is convex in y, so its chord from 0 is above it
        return 0.0 if self.p <= 2 else self.first

    def _raised(self) -> Array:
        raised = self.costs.copy()
        raised[0] = max(raised[0], self.first)
        return raised

    def _grid(self) -> tuple[Array, Array]:
        return np.concatenate([[0.0], self._powers()]), np.concatenate([[0.0], self.costs])

    def _powers(self) -> Array:
        y = self.known**self.p
        # the grid holds the shift that belongs to `at`; its power must be `at` itself
        return np.where(np.abs(y - self.at) <= 1e-12 * self.at, self.at, y)

    def _vertices(self) -> tuple[Array, Array, npt.NDArray[np.intp]]:
        """Where the tangents of each cell's bound cross, how high, and which cell.

        A cell's bound is the chord of h; or, where that is lower, the chord of exp((a - 1) h) less what
        its least bend takes off.
        """
        cell = np.arange(len(self.known) - 1)
        low, high = self.known[:-1], self.known[1:]
        below, above = self.costs[:-1], np.maximum(self.costs[1:], self.costs[:-1])
        with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
            rise = (above - below) / (high - low)
            x, value, over = self._crossing(below, above, rise, rise)
            if self.bend > 0:
                power = self.order - 1
                start, end = np.expm1(power * below), np.expm1(power * above)
                slope = (end - start) / (high - low)
                # no more than that, or the bound would not be concave in y
                half = np.minimum(self.bend * (high - low) / 2, slope * (high - low) / (high + low))
                bent = self._crossing(
                    below,
                    above,
                    (slope - half) / power / (1 + start),
                    (slope + half) / power / (1 + end),
                )
                lower = bent[2] < over
                x, value = np.where(lower, bent[0], x), np.where(lower, bent[1], value)
        return x, np.where(np.isnan(value), np.inf, value), cell

    def _crossing(
        self, below: Array, above: Array, rise: Array, last: Array
    ) -> tuple[Array, Array, Array]:
        """Where tangents of slopes `rise`, `last` in the shift cross, how high, and above the chord."""
        steep = rise / self.p * self.known[:-1] ** (1 - self.p)
        flat = last / self.p * self.known[1:] ** (1 - self.p)
        y_low, y_high = self._powers()[:-1], self._powers()[1:]
        cross = (above - flat * y_high - below + steep * y_low) / (steep - flat)
        middle = (y_low + y_high) / 2
        # any point of the cell will do, as long as both tangents are below the vertex
        x = np.where(np.isfinite(cross), np.clip(cross, y_low, y_high), middle)
        value = np.maximum(below + steep * (x - y_low), above - flat * (y_high - x))
        return x, value, value - below - (above - below) / (y_high - y_low) * (x - y_low)

    def _hull(self, points: Array, heights: Array) -> tuple[float, float, float]:
        """The concave majorant at `at` (its slope at 0 if that is 0), and the points that span it."""
        if self.at == 0:
            if heights[points == 0].max(initial=0.0) > 0:
                return math.inf, 0.0, 0.0
            inside = points > 0
            slope = heights[inside] / points[inside]
            best = int(np.argmax(slope))
            return float(slope[best]), 0.0, float(points[inside][best])
        if np.isinf(heights).any():
            return math.inf, self.at, self.at
        left, right = points <= self.at, points > self.at
        x, y = points[left], heights[left]
        at_left = x == self.at
        level, span = -math.inf, (self.at, self.at)
        if at_left.any():
            level = float(y[at_left].max())
        if right.any():
            share = (self.at - x[:, None]) / (points[right] - x[:, None])
            mixed = (1 - share) * y[:, None] + share * heights[right]
            i, j = np.unravel_index(int(np.argmax(mixed)), mixed.shape)
            if mixed[i, j] > level * OUTWARD:
                level, span = float(mixed[i, j]), (float(x[i]), float(points[right][j]))
        return level, span[0], span[1]
