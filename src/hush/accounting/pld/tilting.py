"""Exponential tilting: the tilt and the window of losses at which a composition is evaluated.

Everything here is an estimate from a few hundred points. A poor one costs accuracy, never
soundness: any tilt is exact, and mass outside the window is bounded afterwards.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hush.accounting.numerics import Array, log_sum_exp
from hush.accounting.pld.privacy_loss import Direction, Step, loss_quadrature

# exp(-NEGLIGIBLE) of the tilted mass may fall outside the window on either side.
NEGLIGIBLE = 25.0


@dataclass(frozen=True)
class Window:
    """A tilt, and the losses between which nearly all tilted mass lies."""

    tilt: float
    low: float
    high: float
    lower_exponent: float
    """Exponent of the Chernoff bound on tilted mass below the window."""
    upper_exponent: float
    """Exponent of the Chernoff bound on tilted mass above the window."""
    deviation: float
    """Standard deviation of the tilted loss."""
    log_delta: float


class Cumulants:
    """Cumulant generating function log E exp(t L) of the composed privacy loss L, at many t at once."""

    def __init__(self, counts: Mapping[Step, int], direction: Direction, tail: float) -> None:
        self._parts = [
            (count, *loss_quadrature(step, direction, tail)) for step, count in counts.items()
        ]

    def __call__(self, exponents: Array) -> Array:
        total = np.zeros(len(exponents))
        for count, losses, weights in self._parts:
            total += count * log_sum_exp(weights + exponents[:, None] * losses)
        return total

    def moments(self, tilt: float) -> tuple[float, float]:
        """Mean and standard deviation (never zero) of the tilted loss."""
        mean = variance = 0.0
        for count, losses, weights in self._parts:
            terms = weights + tilt * losses
            masses = np.exp(terms - terms.max())
            masses /= masses.sum()
            centre = float(masses @ losses)
            mean += count * centre
            variance += count * float(masses @ (losses - centre) ** 2)
        return mean, max(math.sqrt(variance), 1e-9 * abs(mean), 1e-300)


def choose_window(cumulants: Cumulants, *, log_delta: float | None, epsilon: float) -> Window:
    """The window for a target: `log_delta` where it is given, else `epsilon`."""
    # Tilts beyond this would overflow; losses that small have no measurable cost.
    untilted = max(cumulants.moments(0.0)[1], 1e-150)

    def objective(tilts: Array) -> Array:
        if log_delta is None:
            return cumulants(tilts) - tilts * epsilon
        # The improved conversion from Rényi divergence; its best order is close to the saddle point.
        return (cumulants(tilts) - log_delta - np.log1p(tilts)) / tilts + np.log(tilts) - np.log1p(tilts)

    tilt = _minimiser(objective, 1e-6 / untilted, 1e3 / untilted)
    mean, deviation = cumulants.moments(tilt)
    deviation = max(deviation, 1e-6 * untilted)
    log_mass = float(cumulants(np.array([tilt]))[0])
    # Chernoff bounds: the losses beyond which exp(-NEGLIGIBLE) of the tilted mass lies, at most
    exponents = np.geomspace(1e-2, 1e3, 80) / deviation
    highs = (cumulants(tilt + exponents) - log_mass + NEGLIGIBLE) / exponents
    lows = (log_mass - cumulants(tilt - exponents) - NEGLIGIBLE) / exponents
    upper, lower = int(np.argmin(highs)), int(np.argmax(lows))
    return Window(
        tilt=tilt,
        low=float(lows[lower]),
        high=float(highs[upper]),
        lower_exponent=float(exponents[lower]),
        upper_exponent=float(exponents[upper]),
        deviation=deviation,
        log_delta=log_mass - tilt * mean if log_delta is None else log_delta,
    )


def _minimiser(objective: Callable[[Array], Array], low: float, high: float) -> float:
    """Approximate minimiser of `objective` between two positive numbers."""
    for points in (60, 12, 12):
        grid = np.geomspace(low, high, points)
        best = int(np.argmin(objective(grid)))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    return float(math.sqrt(low * high))
