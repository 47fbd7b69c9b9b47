"""Why Figure 4's published epsilon is not monotone in beta at epsilon 4: the accountant's whole orders.

Above beta 2 noise is calibrated by Rényi divergences, which sampling amplifies at whole orders only. As
beta grows the best of them changes, from 5 to 4, and a low order leaves little of epsilon to the steps.
Beside it: the same change, in one coordinate, at orders a tenth apart, by integration. That is what the
whole orders cost, and not a guarantee for vectors.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import logsumexp

from hush.accounting.epsilon import epsilon, rdp
from hush.accounting.numerics import Array
from hush.accounting.rdp.conversion import conversion_term
from hush.accounting.rdp.coordinatewise import WHOLE_ORDERS
from hush.core.plan import Plan
from hush_recipes.figure import Figure
from hush_recipes.gg.beta_sgd import DELTA, Noise, enough, inputs
from hush_recipes.gg.fig4 import ADULT

BETAS = (2.0909, 2.3636, 2.6364, 2.9091, 3.0, 3.1818, 3.4545, 3.7273, 4.0)
LEVEL = 4.0
_NEAR = 1.0
"""Fractional orders are searched so far from the best whole one."""
_TAIL = 1000.0
"""Log of the density at the ends, from its peak: high moments have their mass far out."""
_POINTS = 12_001


def gg_orders(*, betas: Sequence[float] = BETAS, epsilons: Sequence[float] = (LEVEL,)) -> Figure:
    """The order that decides the noise of beta-DP-SGD on Adult, and its published epsilon, by beta."""
    records = len(inputs(ADULT).y_train)
    rate, steps = ADULT.rate(records), ADULT.steps(records)
    rows = []
    for level in epsilons:
        for beta in betas:
            noise = enough((beta, level, rate, steps))
            scale = float(noise.plan.noise.to_plain()["multiplier"])
            order = best_order(noise)
            left = level - float(conversion_term(np.array([order]), DELTA)[0])
            tenths = np.arange(max(1.5, order - _NEAR), order + _NEAR, 0.1)
            finer = least_scale(beta, level, rate, steps, tenths)
            published = [noise.published, published_epsilon(noise.plan, finer, steps)]
            rows.append([level, beta, scale, order, left, published[0], finer, published[1]])

    def draw(axes: Any) -> None:
        for number, level in enumerate(epsilons):
            at_level = [row for row in rows if row[0] == level]
            for column, line, name in ((5, "o-", "whole orders"), (7, "--", "orders a tenth apart")):
                axes.plot(
                    [row[1] for row in at_level],
                    [row[column] for row in at_level],
                    line,
                    color=f"C{number}",
                    markersize=3,
                    label=f"epsilon {level:g}, {name}",
                )
        axes.set(xlabel="beta", ylabel="published epsilon of the same noise")
        axes.legend()

    return Figure(
        name="gg-orders",
        title=f"beta-DP-SGD on Adult, delta {DELTA:g}: the order that decides",
        header=[
            *("epsilon", "beta", "scale", "best order", "left for the steps", "published epsilon"),
            *("scale, tenths", "published, tenths"),
        ],
        rows=rows,
        draw=draw,
        notes=[
            f"{steps} steps at rate {rate:.5f}; noise for the epsilon of the line, by whole "
            "orders, as it is charged",
            "left for the steps: epsilon less what the conversion at that order takes, whatever is run",
            "tenths: the noise that orders a tenth apart would ask for, for a change of one coordinate; "
            "no guarantee",
        ],
    )


def best_order(noise: Noise) -> float:
    """The whole order at which the noise's epsilon is least."""
    divergences = noise.steps * rdp(noise.plan, WHOLE_ORDERS)
    return float(WHOLE_ORDERS[np.argmin(divergences + conversion_term(WHOLE_ORDERS, DELTA))])


def least_scale(beta: float, level: float, rate: float, steps: int, orders: Array) -> float:
    """The least scale within the epsilon for one coordinate moved by 1, by the best of these orders."""

    def excess(scale: float) -> float:
        divergences = [sampled_divergence(beta, scale, rate, order) for order in orders]
        return float((steps * np.array(divergences) + conversion_term(orders, DELTA)).min()) - level

    return float(brentq(excess, 0.3, 30.0, xtol=1e-4))


def sampled_divergence(beta: float, scale: float, rate: float, order: float) -> float:
    """Rényi divergence of one sampled noisy number, the larger direction, by the rectangle rule."""
    reach = scale * _TAIL ** (1 / beta)
    points = np.linspace(-reach, 1 + reach, _POINTS)
    without, moved = (-((np.abs(points - shift) / scale) ** beta) for shift in (0.0, 1.0))
    without, moved = (log_density - logsumexp(log_density) for log_density in (without, moved))
    mixture = np.logaddexp(math.log1p(-rate) + without, math.log(rate) + moved)
    pairs = ((mixture, without), (without, mixture))
    moments = [logsumexp(order * first + (1 - order) * second) for first, second in pairs]
    return float(max(moments)) / (order - 1)


def published_epsilon(plan: Plan, scale: float, steps: int) -> float:
    """Epsilon of the plan with noise of this scale, as if it had one dimension."""
    noisy = replace(plan, noise=plan.noise.with_multiplier(scale))
    return epsilon(noisy, steps, DELTA, dimension=1).epsilon.upper
