"""Block-wise Gaussian noise of least total variance within a budget.

The search is not trusted: the accountants charge the noise like any other.
docs/guarantees/shaped-noise.md.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hush.accounting import composition
from hush.accounting.calibrate import calibrate, largest_affordable
from hush.accounting.least_variance import BlockCost, Optimum, least_variance
from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.rdp.conversion import conversion_term
from hush.accounting.rdp.coordinatewise import WHOLE_ORDERS, AdjacentPair
from hush.accounting.steps import Block, ComposableStep, CoordinateWise
from hush.clipping import L2
from hush.core.errors import BudgetExceeded
from hush.core.guarantee import Budget
from hush.core.parts import SensitivitySet
from hush.core.plan import Plan
from hush.core.value import check_kind
from hush.noise import BlockGaussian, Gaussian
from hush.sampling import FullBatch, Poisson

Blocks = Sequence[SensitivitySet]
"""The changes that one record can make in each block of coordinates."""

_MAX_CORRECTIONS = 20
# Largest factor by which noise is scaled from the result of the search for its proportions.
_MAX_SCALE = 1e6


def fit_noise(plan: Plan, budget: Budget, steps: int, dimension: int | None = None) -> Plan:
    """The plan with the Gaussian noise of least total variance for `steps` steps within `budget`.

    Args:
        plan: Plan whose noise is replaced.
        budget: Epsilon and delta of all steps.
        steps: Number of steps.
        dimension: Number of parameters, if the clipping does not determine it.

    Returns:
        The plan with `BlockGaussian` noise, one multiplier for each block of the clipping, or with
        `Gaussian` noise if there is one block.

    **Guarantee.** As for `calibrate`, which scales the noise to the budget.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Poisson(rate=0.02),
    ...     clipping=hush.Subspaces(ranks=(1000, 290_898), l2=(2.5, 1.0)),
    ...     noise=hush.Gaussian(multiplier=1.0),
    ... )
    >>> fitted = hush.fit_noise(plan, hush.Budget(epsilon=8.0, delta=1e-5), steps=5000)
    >>> [round(float(multiplier), 2) for multiplier in fitted.noise.multipliers]
    [3.05, 1.17]
    """
    check_kind("budget", budget, Budget)
    balls = check_kind("plan", plan, Plan).clipping.sensitivity(dimension)
    if len(balls) == 1:
        return calibrate(replace(plan, noise=Gaussian(multiplier=1.0)), budget, steps, dimension)
    rate, coordinate_rate = plan.sampling.participation, plan.sampling.coordinate_participation
    deviations = least_variance_deviations(
        balls, rate=rate, coordinate_rate=coordinate_rate, budget=budget, steps=steps
    )
    multipliers = [deviation / ball.l2_radius for deviation, ball in zip(deviations, balls, strict=True)]
    return calibrate(
        replace(plan, noise=BlockGaussian(multipliers=multipliers)), budget, steps, dimension
    )


def least_variance_deviations(
    blocks: Blocks, *, rate: float, coordinate_rate: float = 1.0, budget: Budget, steps: int
) -> list[float]:
    """Deviation of each block's Gaussian noise, of least total variance within `budget`.

    Args:
        blocks: The changes that one record can make in each block of coordinates.
        rate: Probability that a record takes part in a step.
        coordinate_rate: Probability that a coordinate of a record takes part. At 1 the proportions are
            a closed form, scaled by privacy loss distributions. Below 1 both are from Rényi divergences
            at whole orders.
        budget: Epsilon and delta of all steps.
        steps: Number of steps.

    **Guarantee.** The noise keeps the budget: docs/guarantees/shaped-noise.md.
    """
    if coordinate_rate == 1:
        plain = Plan(
            sampling=FullBatch() if rate == 1 else Poisson(rate=rate),
            clipping=L2(norm=1.0),
            noise=Gaussian(multiplier=1.0),
        )
        noise = calibrate(plain, budget, steps).noise
        multiplier = float(noise.to_plain()["multiplier"]) * OUTWARD
        return (multiplier * closed_form_deviations(blocks)).tolist()  # type: ignore[no-any-return]
    optimum, limit = search(blocks, rate, coordinate_rate, budget, steps)
    log_variances = certified(blocks, optimum.log_variances, rate, coordinate_rate, optimum.order, limit)
    return np.exp(log_variances / 2).tolist()  # type: ignore[no-any-return]


def charged_variance(
    blocks: Blocks, *, rate: float, coordinate_rate: float, budget: Budget, steps: int
) -> float:
    """Total variance of noise for sampled coordinates, in the best proportions, as it is charged.

    The proportions are the best ones by Rényi divergences, or the closed form if Rényi divergences
    exceed the budget with any noise.

    Args:
        blocks: The changes that one record can make in each block of coordinates.
        rate: Probability that a record takes part in a step.
        coordinate_rate: Probability that a coordinate of a record takes part, below 1.
        budget: Epsilon and delta of all steps.
        steps: Number of steps.

    **Guarantee.** The noise keeps the budget by its dominating pair
    (docs/guarantees/twice-sampling-pld.md) or by Rényi divergence.
    """
    deviations = closed_form_deviations(blocks)
    with contextlib.suppress(BudgetExceeded):
        deviations = np.array(
            least_variance_deviations(
                blocks, rate=rate, coordinate_rate=coordinate_rate, budget=budget, steps=steps
            )
        )

    def spend(precision: float) -> float:
        noisy = _noisy_blocks(blocks, deviations / precision)
        step: dict[ComposableStep, int] = {CoordinateWise(rate, noisy, coordinate_rate): steps}
        return composition.epsilon_upper(step, budget.delta)

    precision = largest_affordable(
        spend, budget.epsilon, start=1.0, low=1 / _MAX_SCALE, high=_MAX_SCALE, whole=False
    )
    if precision is None:
        raise BudgetExceeded(
            f"epsilon={budget.epsilon:g} at delta={budget.delta:g} is less than all noise that was "
            "tried costs. Allow a larger budget, or fewer steps."
        )
    ranks = np.array([block.size for block in blocks], dtype=float)
    return float(ranks @ (deviations / precision) ** 2)


def closed_form_deviations(blocks: Blocks) -> Array:
    """Optimal deviations up to scale: as private as noise of deviation 1 under a sensitivity of 1.

    Theorem 4.6 of the twice-sampling paper, variance proportional to norm / sqrt(rank); with ranks of
    1 it is Theorem 4.5, with one block Theorem 4.3.
    """
    ranks = np.array([block.size for block in blocks], dtype=float)
    norms = np.array([block.l2_radius for block in blocks])
    deviations: Array = np.sqrt(norms / np.sqrt(ranks) * (norms @ np.sqrt(ranks)))
    return deviations


def divergence_limits(budget: Budget, steps: int) -> dict[int, float]:
    """Largest Rényi divergence of a step at each whole order at which one is within the budget."""
    limits = (budget.epsilon - conversion_term(WHOLE_ORDERS, budget.delta)) / steps
    positive = {int(a): float(limit) for a, limit in zip(WHOLE_ORDERS, limits, strict=True) if limit > 0}
    if not positive:
        raise BudgetExceeded(
            f"epsilon={budget.epsilon:g} at delta={budget.delta:g} is less than Rényi divergences give "
            f"at any order up to {WHOLE_ORDERS[-1]:g}, with any noise. Allow a larger budget, or use "
            "all coordinates (coordinate_rate=1), which is charged more tightly."
        )
    return positive


def search(
    blocks: Blocks, rate: float, coordinate_rate: float, budget: Budget, steps: int
) -> tuple[Optimum, float]:
    """The optimum of Theorem 5.6 of the twice-sampling paper over all orders, and its limit."""
    limits = divergence_limits(budget, steps)
    cost = BlockCost(blocks, rate, coordinate_rate, max(limits), AdjacentPair.POSITIVE)
    ranks = np.array([block.size for block in blocks], dtype=float)
    optimum = least_variance(cost, ranks, limits, 2 * np.log(closed_form_deviations(blocks)))
    return optimum, limits[optimum.order]


def certified(
    blocks: Blocks,
    log_variances: Array,
    rate: float,
    coordinate_rate: float,
    order: int,
    limit: float,
) -> Array:
    """The log-variances, raised until the accountant's divergence is within the limit."""
    for _ in range(_MAX_CORRECTIONS):
        noisy = _noisy_blocks(blocks, np.exp(log_variances / 2))
        divergence = float(CoordinateWise(rate, noisy, coordinate_rate).rdp(np.array([order]))[0])
        if divergence <= limit:
            return log_variances
        # k times the variance costs less than 1/k of the divergence, which is convex in the precision
        log_variances = log_variances + math.log(divergence / limit * OUTWARD)
    raise AssertionError("more noise costs less")


def _noisy_blocks(blocks: Blocks, deviations: Array) -> tuple[Block, ...]:
    return tuple(
        Block(2.0, math.sqrt(2) * float(deviation), block)
        for block, deviation in zip(blocks, deviations, strict=True)
    )
