"""Where to look: the tilt and the window at which a composition is evaluated.

Everything here is an estimate from a few hundred points. A poor one costs accuracy, never
soundness: any tilt is exact, and what falls outside the window is bounded afterwards.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from hush.accounting.pld.privacy_loss import Array, Direction, Step, nodes

# exp(-NEGLIGIBLE) of the tilted mass may fall outside the window on either side.
NEGLIGIBLE = 25.0


@dataclass(frozen=True)
class Window:
    """The tilt, the losses between which nearly all tilted mass lies, and the proof's exponents."""

    tilt: float
    bottom: float
    top: float
    falling: float
    rising: float
    spread: float
    log_delta: float


class Cumulants:
    """log E exp(t L) of the composed loss L under its first law, at many t at once."""

    def __init__(self, counts: Mapping[Step, int], direction: Direction, tail: float) -> None:
        self._parts = [(count, *nodes(step, direction, tail)) for step, count in counts.items()]

    def __call__(self, exponents: Array) -> Array:
        total = np.zeros(len(exponents))
        for count, losses, weights in self._parts:
            terms = weights + exponents[:, None] * losses
            peak = terms.max(axis=1)
            total += count * (peak + np.log(np.exp(terms - peak[:, None]).sum(axis=1)))
        return total

    def scale(self, tilt: float) -> tuple[float, float]:
        """The mean and standard deviation of the tilted loss; a constant loss spreads a little."""
        mean = variance = 0.0
        for count, losses, weights in self._parts:
            terms = weights + tilt * losses
            chance = np.exp(terms - terms.max())
            chance /= chance.sum()
            centre = float(chance @ losses)
            mean += count * centre
            variance += count * float(chance @ (losses - centre) ** 2)
        return mean, max(math.sqrt(variance), 1e-9 * abs(mean), 1e-300)


def window(cumulants: Cumulants, *, log_delta: float | None, epsilon: float) -> Window:
    """The window for a target: `log_delta` where it is given, else `epsilon`."""
    # Tilts beyond this would overflow; losses that small cost nothing anyone could measure.
    plain = max(cumulants.scale(0.0)[1], 1e-150)

    def objective(tilts: Array) -> Array:
        if log_delta is None:
            return cumulants(tilts) - tilts * epsilon
        # The improved conversion from Rényi divergence; its best order is close to the saddle.
        return (cumulants(tilts) - log_delta - np.log1p(tilts)) / tilts + np.log(tilts) - np.log1p(tilts)

    tilt = _minimiser(objective, 1e-6 / plain, 1e3 / plain)
    mean, spread = cumulants.scale(tilt)
    spread = max(spread, 1e-6 * plain)
    start = float(cumulants(np.array([tilt]))[0])
    exponents = np.geomspace(1e-2, 1e3, 80) / spread
    tops = (cumulants(tilt + exponents) - start + NEGLIGIBLE) / exponents
    bottoms = (start - cumulants(tilt - exponents) - NEGLIGIBLE) / exponents
    rising, falling = int(np.argmin(tops)), int(np.argmax(bottoms))
    return Window(
        tilt=tilt,
        bottom=float(bottoms[falling]),
        top=float(tops[rising]),
        falling=float(exponents[falling]),
        rising=float(exponents[rising]),
        spread=spread,
        log_delta=start - tilt * mean if log_delta is None else log_delta,
    )


def _minimiser(objective: Callable[[Array], Array], low: float, high: float) -> float:
    """Roughly where `objective` is least between two positive numbers."""
    for points in (60, 12, 12):
        grid = np.geomspace(low, high, points)
        best = int(np.argmin(objective(grid)))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
    return float(math.sqrt(low * high))
