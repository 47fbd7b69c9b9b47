"""Noise of least total variance, beside isotropic noise and the closed form."""

import contextlib
from dataclasses import dataclass

import numpy as np

from hush.accounting import composition
from hush.accounting.calibrate import closed_form_deviations, largest_affordable
from hush.accounting.numerics import Array
from hush.accounting.steps import CoordinateWise
from hush.core.errors import BudgetExceeded
from hush.core.guarantee import Budget
from hush_recipes.twice.search import (
    BlockCost,
    Blocks,
    certified,
    divergence_limits,
    least_variance_deviations,
    scale_to_limit,
)

MAX_SCALE = 1e6
"""Largest factor between the noise and the result of the search for its proportions."""


@dataclass(frozen=True, kw_only=True)
class LeastVarianceNoise:
    """The standard deviation of each block's noise; variances are sums over all coordinates."""

    deviations: tuple[float, ...]
    variance: float
    isotropic: float
    """Least total variance of isotropic noise."""
    closed_form: float
    """Least total variance in the proportions that are best if all coordinates take part."""

    @property
    def gain(self) -> float:
        """Total variance of isotropic noise over this one's."""
        return self.isotropic / self.variance


def least_variance_noise(
    blocks: Blocks, *, rate: float, budget: Budget, steps: int, coordinate_rate: float = 1.0
) -> LeastVarianceNoise:
    """The Gaussian noise of least total variance, with what other proportions need.

    Args:
        blocks: The changes that one record can make in each block of coordinates.
        rate: Probability that a record takes part in a step.
        budget: Epsilon and delta of all steps.
        steps: Number of steps.
        coordinate_rate: Probability that a coordinate of a record takes part.
    """
    ranks, norms = np.array([[block.size, block.l2_radius] for block in blocks], dtype=float).T
    shape = closed_form_deviations(blocks)
    deviations = least_variance_deviations(
        blocks, rate=rate, coordinate_rate=coordinate_rate, budget=budget, steps=steps
    )
    variance = float(ranks @ deviations**2)
    if coordinate_rate == 1:
        multiplier = deviations[0] / shape[0]
        isotropic, closed_form = float(multiplier**2 * (norms @ norms) * ranks.sum()), variance
    else:
        limits = divergence_limits(budget, steps)
        cost = BlockCost(blocks, rate, coordinate_rate, max(limits))

        def scaled(log_shape: Array) -> float:
            by_order = {a: scale_to_limit(cost, a, limit, log_shape) for a, limit in limits.items()}
            order = min(by_order, key=lambda a: float(by_order[a][0]))
            log_variances = certified(
                blocks, by_order[order], rate, coordinate_rate, order, limits[order]
            )
            return float(ranks @ np.exp(log_variances))

        isotropic, closed_form = scaled(np.zeros(len(blocks))), scaled(2 * np.log(shape))
    return LeastVarianceNoise(
        deviations=tuple(deviations.tolist()),
        variance=variance,
        isotropic=isotropic,
        closed_form=closed_form,
    )


def charged_variance(
    blocks: Blocks, *, rate: float, coordinate_rate: float, budget: Budget, steps: int
) -> float:
    """Total variance of noise for sampled coordinates within `budget`, in the best proportions.

    The proportions are the best ones by Rényi divergences, or the closed form if Rényi divergences
    exceed the budget with any noise. The scale is from the smaller of all proved costs.
    """
    deviations = closed_form_deviations(blocks)
    with contextlib.suppress(BudgetExceeded):
        deviations = least_variance_deviations(
            blocks, rate=rate, coordinate_rate=coordinate_rate, budget=budget, steps=steps
        )

    def spend(precision: float) -> float:
        noisy = tuple(zip(blocks, deviations / precision, strict=True))
        step = CoordinateWise.normal(rate, noisy, coordinate_rate)
        return composition.epsilon_upper({step: steps}, budget.delta)

    precision = largest_affordable(
        spend, budget.epsilon, start=1.0, low=1 / MAX_SCALE, high=MAX_SCALE, whole=False
    )
    if precision is None:
        raise BudgetExceeded(
            f"epsilon={budget.epsilon:g} at delta={budget.delta:g} is less than the cost of the largest "
            "noise in the search. Allow a larger budget, or fewer steps."
        )
    ranks = np.array([block.size for block in blocks], dtype=float)
    return float(ranks @ (deviations / precision) ** 2)
