"""Figure 10 of the generalized Gaussian paper: Laplace and Gaussian votes at equal Rényi divergence.

Two classes, a gap between them, and one (order, epsilon) of Rényi divergence for a count: which of
the two laws is right more often?
"""

import math
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import ndtr

from hush.accounting.rdp.profile import CoordinateRDP, NoiseDensity
from hush.report.figure import Figure

SETTINGS = ((2.0, 0.1), (2.0, 1.0), (10.0, 1.0), (10.0, 5.0), (50.0, 1.0))
GAPS = tuple(range(0, 21, 2))


def gg_fig10() -> Figure:
    """The chance that the right class wins, by gap."""
    curves: dict[str, list[float]] = {}
    for order, epsilon in SETTINGS:
        name = f"order {order:g}, epsilon {epsilon:g}"
        deviation = math.sqrt(order / (2 * epsilon))
        curves[f"Gaussian, {name}"] = [float(ndtr(gap / (deviation * math.sqrt(2)))) for gap in GAPS]
        scale = laplace_scale(order, epsilon)
        # the difference of two Laplace draws: Kotz et al. 2001, 2.3.23
        curves[f"Laplace, {name}"] = [1 - math.exp(-gap / scale) * (gap / scale + 2) / 4 for gap in GAPS]

    def draw(axes: Any) -> None:
        for k, (order, epsilon) in enumerate(SETTINGS):
            name = f"order {order:g}, epsilon {epsilon:g}"
            axes.plot(GAPS, curves[f"Gaussian, {name}"], color=f"C{k}", label=name)
            axes.plot(GAPS, curves[f"Laplace, {name}"], "--", color=f"C{k}")
        axes.set(xlabel="gap in votes", ylabel="utility (Gaussian solid, Laplace dashed)")
        axes.legend(frameon=False)

    return Figure(
        name="gg-fig10",
        title="Laplace and Gaussian at equal Rényi divergence of a count",
        header=["noise", *(f"gap {gap}" for gap in GAPS)],
        rows=[[name, *values] for name, values in curves.items()],
        draw=draw,
        notes=["as in the paper, which law is better depends on the order and epsilon, and on the gap"],
    )


def laplace_scale(order: float, epsilon: float) -> float:
    """The scale at which Laplace noise has this divergence for a change of 1."""

    def excess(log_scale: float) -> float:
        law = NoiseDensity(beta=1.0, scale=float(np.exp(log_scale)))
        return float(CoordinateRDP(law=law)(order, 1.0)) - epsilon

    return math.exp(brentq(excess, -5.0, 8.0))
