"""Exact output laws of a selection over small discrete trials, and of one over a shifted normal number.

Sums over the number of trials with SciPy's laws; nothing here is shared with what it checks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import optimize, special, stats

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Law:
    """Probabilities of 1, 2, 3, ... trials."""

    probabilities: Array

    @property
    def mean(self) -> float:
        return float(np.arange(1, len(self.probabilities) + 1) @ self.probabilities)

    def generating(self, t: Array) -> Array:
        """E t^K."""
        return np.asarray(t * np.polyval(self.probabilities[::-1], t))

    def derivative(self, t: Array) -> Array:
        numbers = np.arange(1, len(self.probabilities) + 1)
        return np.asarray(np.polyval((self.probabilities * numbers)[::-1], t))


@lru_cache
def law(kind: str, shape: float, mean: float, most: int = 1500) -> Law:
    """The law of this mean, its parameter by root search on the mean of SciPy's law."""
    numbers = np.arange(1, most + 1)

    def given(parameter: float) -> Array:
        if kind == "fixed":
            return np.where(numbers == round(mean), 1.0, 0.0)
        if kind == "poisson":
            weights = stats.poisson.pmf(numbers, parameter)
        elif shape == 0:
            weights = stats.logser.pmf(numbers, 1 - parameter)
        else:
            weights = stats.nbinom.pmf(numbers, shape, parameter)
        return np.asarray(weights / weights.sum())

    ends = (1e-6, 2 * mean) if kind == "poisson" else (2e-2 / mean, 1 - 1e-9)
    root = 1.0 if kind == "fixed" else optimize.brentq(lambda p: Law(given(p)).mean - mean, *ends)
    probabilities = given(root)
    return Law(probabilities[: int(np.flatnonzero(probabilities > 1e-18)[-1]) + 1])


def best(outcome: Array, number: Law) -> Array:
    """Law of the best of the trials; outcomes are in order, the best one last."""
    top = number.generating(np.minimum(np.cumsum(outcome), 1.0))
    return np.diff(top, prepend=0.0)


def hockey_stick(first: Array, second: Array, epsilon: float) -> float:
    return float(np.maximum(first - np.exp(epsilon) * second, 0).sum())


def delta(first: Array, second: Array, epsilon: float) -> float:
    """The larger of both directions."""
    return max(hockey_stick(first, second, epsilon), hockey_stick(second, first, epsilon))


def renyi(first: Array, second: Array, order: float) -> float:
    """The larger of both directions."""
    return max(
        float(special.logsumexp(order * np.log(p) + (1 - order) * np.log(q)) / (order - 1))
        for p, q in ((first, second), (second, first))
    )


def best_normal(
    mu: float, number: Law, chance_of_less: Callable[[Array, float], Array]
) -> tuple[Array, Array]:
    """Laws of the best of trials that are N(mu, 1) and N(0, 1), on a fine grid.

    `chance_of_less(x, centre)` is the probability that a trial around the centre is worse than x.
    """
    x = np.linspace(-12.0, 12.0 + mu, 8_001)
    first, second = (
        stats.norm.pdf(x, centre) * number.derivative(chance_of_less(x, centre)) * (x[1] - x[0])
        for centre in (mu, 0.0)
    )
    return first, second
