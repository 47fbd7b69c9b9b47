"""Noise with density exp(-(|x|_2 / s)^beta) of the whole vector, against independent coordinates.

For beta = 1 this is the K-norm mechanism of the Euclidean ball (Hardt and Talwar, 2010). A record moves
the vector by 1 in the Euclidean norm. One release at epsilon 1 and delta 1e-5, without sampling.
"""

from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import betainc, gammaln
from scipy.stats import gamma

from hush_recipes.figure import Figure

BETAS = (1.0, 1.5, 2.0)
DIMENSIONS = (3, 10, 100, 1000, 10_000, 100_000)
EPSILON, DELTA = 1.0, 1e-5


def spherical_delta(scale: float, beta: float, dimension: int, epsilon: float) -> float:
    """Delta in three or more dimensions: P(L > epsilon) - e^epsilon Q(L > epsilon), by the radius."""
    law = gamma(dimension / beta)  # of (radius / scale)^beta
    low, high = law.ppf(1e-18), law.isf(1e-18)
    nodes, weights = np.polynomial.legendre.leggauss(300)
    power = low + (high - low) * (nodes + 1) / 2
    mass = (high - low) / 2 * weights * np.exp(law.logpdf(power))
    radius, far, near = (
        scale * np.maximum(power + shift, 0) ** (1 / beta) for shift in (0, epsilon, -epsilon)
    )

    def below(projection: np.ndarray) -> np.ndarray:
        """Probability of a smaller cosine of a uniform direction with the change."""
        half = (dimension - 1) / 2
        return np.asarray(betainc(half, half, np.clip((projection + 1) / 2, 0, 1)))

    first = below(((radius - far) * (radius + far) + 1) / (2 * radius))
    second = below(((near - radius) * (near + radius) - 1) / (2 * radius))
    return float(mass @ first - np.exp(epsilon) * (mass @ second))


def least_deviation(beta: float, dimension: int) -> float:
    """Least standard deviation of a coordinate at (EPSILON, DELTA)."""

    def excess(log_scale: float) -> float:
        found = spherical_delta(np.exp(log_scale), beta, dimension, EPSILON)
        return float(np.log(max(found, 1e-300) / DELTA))

    # root mean square of a coordinate at scale 1
    unit = np.exp((gammaln((dimension + 2) / beta) - gammaln(dimension / beta)) / 2) / dimension**0.5
    return float(unit * np.exp(brentq(excess, np.log(0.5 / unit), np.log(8 / unit), xtol=1e-9)))


def gg_spherical() -> Figure:
    """Least deviation of noise that is jointly distributed over coordinates, by dimension."""
    rows = [[d, *(least_deviation(beta, d) for beta in BETAS)] for d in DIMENSIONS]

    def draw(axes: Any) -> None:
        for column, beta in enumerate(BETAS, 1):
            axes.plot(DIMENSIONS, [row[column] for row in rows], "o-", ms=3, label=f"beta {beta:g}")
        axes.set(xscale="log", xlabel="dimension", ylabel="deviation of a coordinate", ylim=(0, None))
        axes.legend(frameon=False)

    return Figure(
        name="gg-spherical",
        title=f"spherical noise, one release at epsilon {EPSILON:g}, delta {DELTA:g}",
        header=["dimension", *(f"beta {beta:g}" for beta in BETAS)],
        rows=rows,
        draw=draw,
        notes=["beta 2 is Gaussian noise; the radius concentrates, and every beta tends to it"],
    )
