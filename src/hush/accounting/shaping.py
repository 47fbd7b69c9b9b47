"""Block-wise Gaussian noise of least total variance within a budget.

The search is not trusted: whatever noise it finds is charged by the accountants of any other noise.
"""

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hush.accounting import composition
from hush.accounting.calibrate import calibrate, largest_affordable
from hush.accounting.least_variance import BlockCost, ScaledShape, least_variance
from hush.accounting.numerics import OUTWARD, Array
from hush.accounting.rdp.conversion import Conversion, conversion_term
from hush.accounting.rdp.coordinatewise import WHOLE_ORDERS, AdjacentPair
from hush.accounting.rdp.profile import PARTICIPATION
from hush.accounting.steps import Block, ComposableStep, CoordinateWise
from hush.clipping import L2
from hush.core.errors import BudgetExceeded, InvalidValue
from hush.core.guarantee import Budget
from hush.core.parts import SensitivitySet
from hush.core.plan import Plan
from hush.core.value import check_count, check_kind
from hush.noise import BlockGaussian, Gaussian
from hush.sampling import FullBatch, Poisson

_MAX_CORRECTIONS = 20
# How far noise may be scaled from where the search for its proportions left it.
_MAX_SCALE = 1e6


@dataclass(frozen=True, kw_only=True)
class LeastVarianceNoise:
    """The standard deviation of each block's noise, and how close to the least total variance it is."""

    deviations: tuple[float, ...]
    variance: float
    """Summed over all coordinates."""
    isotropic: float
    """The least total variance of isotropic noise, under the same accounting."""
    closed_form: float
    """The least total variance in the proportions that are best where all coordinates take part."""
    residual: float
    """Violation of the Karush-Kuhn-Tucker conditions: the largest difference between a block's share of
    the variance and its share of the divergence's slope. 0 at the optimum."""
    order: int | None
    """The order at which the Rényi divergence decides; none under tight accounting."""
    method: str
    """How the shape was computed, in words."""

    @property
    def gain(self) -> float:
        """The total variance of isotropic noise over this one's."""
        return self.isotropic / self.variance


def least_variance_noise(
    blocks: Sequence[SensitivitySet],
    *,
    rate: float,
    budget: Budget,
    steps: int,
    coordinate_rate: float = 1.0,
    conversion: Conversion = "improved",
) -> LeastVarianceNoise:
    """The Gaussian noise of least total variance that keeps `budget` for `steps` steps.

    Args:
        blocks: the changes that one record can make in each block of coordinates.
        rate: the probability that a record takes part in a step.
        budget: epsilon and delta of all steps.
        steps: how many steps are composed.
        coordinate_rate: the probability that a coordinate of a record takes part. At 1 the shape is in
            closed form, scaled by privacy loss distributions; below, both come from Rényi divergences
            at whole orders.
        conversion: from Rényi divergences to epsilon; not used at a coordinate rate of 1.

    Returns:
        The deviations, and how close to the least variance they are.

    **Guarantee.** The noise keeps the budget: it was charged by what charges any other noise. That
    it is the least is proved, up to `residual`: docs/guarantees/shaped-noise.md.

    >>> from hush.core.guarantee import Budget
    >>> blocks = [
    ...     SensitivitySet(p=2.0, norm=2.5, dimension=1000),
    ...     SensitivitySet(p=2.0, norm=1.0, dimension=290_898),
    ... ]
    >>> budget = Budget(epsilon=8.0, delta=1e-5)
    >>> noise = least_variance_noise(blocks, rate=0.02, budget=budget, steps=5000)
    >>> round(noise.gain, 1)
    5.5
    """
    if not blocks:
        raise InvalidValue(
            "blocks=[] must not be empty: pass e.g. "
            "blocks=[SensitivitySet(p=2.0, norm=1.0, dimension=10)]."
        )
    rate = PARTICIPATION["range"].check("rate", rate)
    coordinate_rate = PARTICIPATION["range"].check("coordinate_rate", coordinate_rate)
    steps = check_count("steps", steps, "with no step there is no noise to choose", at_least=1)
    if coordinate_rate == 1:
        return _closed_form(blocks, rate, budget, steps)
    return _convex_search(blocks, rate, coordinate_rate, budget, steps, conversion)


def charged_variance(
    blocks: Sequence[SensitivitySet], *, rate: float, coordinate_rate: float, budget: Budget, steps: int
) -> float:
    """The total variance of noise for sampled coordinates, in the best proportions, as it is charged.

    Args:
        blocks: the changes that one record can make in each block of coordinates.
        rate: the probability that a record takes part in a step.
        coordinate_rate: the probability that a coordinate of a record takes part, below 1.
        budget: epsilon and delta of all steps.
        steps: how many steps are composed.

    Returns:
        The variance, summed over all coordinates. The proportions are those that are best by Rényi
        divergences, or, where these keep the budget with no noise at all, with all coordinates.

    **Guarantee.** The noise keeps the budget: its dominating pair says so
    (docs/guarantees/twice-sampling-pld.md), or Rényi divergence does.
    """
    deviations = closed_form_deviations(blocks)
    with contextlib.suppress(BudgetExceeded):
        by_rdp = least_variance_noise(
            blocks, rate=rate, coordinate_rate=coordinate_rate, budget=budget, steps=steps
        )
        deviations = np.array(by_rdp.deviations)

    def spend(precision: float) -> float:
        noisy = _noisy_blocks(blocks, deviations / precision)
        step: dict[ComposableStep, int] = {CoordinateWise(rate, noisy, coordinate_rate): steps}
        return composition.epsilon_upper(step, budget.delta)

    precision = largest_affordable(
        spend, budget.epsilon, start=1.0, low=1 / _MAX_SCALE, high=_MAX_SCALE, whole=False
    )
    if precision is None:
        raise BudgetExceeded(
            f"epsilon={budget.epsilon:g} at delta={budget.delta:g} is not kept by any noise that was "
            "tried. Allow a larger budget, or fewer steps."
        )
    ranks = np.array([block.size for block in blocks], dtype=float)
    return float(ranks @ (deviations / precision) ** 2)


def fit_noise(plan: Plan, budget: Budget, steps: int, dimension: int | None = None) -> Plan:
    """The plan with the Gaussian noise of least total variance for `steps` steps within `budget`.

    Args:
        plan: its sampling and clipping decide; its noise is replaced.
        budget: epsilon and delta of all steps.
        steps: how many steps are composed.
        dimension: the number of parameters, where the clipping does not say it.

    Returns:
        The plan with `BlockGaussian` noise, one multiplier for each block of the clipping; with plain
        `Gaussian` noise where there is one block.

    **Guarantee.** As for `calibrate`, which has the last word: the shape is only where to look.

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
    noise = least_variance_noise(
        balls,
        rate=plan.sampling.participation,
        budget=budget,
        steps=steps,
        coordinate_rate=plan.sampling.coordinate_participation,
    )
    multipliers = [
        deviation / ball.l2_radius for deviation, ball in zip(noise.deviations, balls, strict=True)
    ]
    return calibrate(
        replace(plan, noise=BlockGaussian(multipliers=multipliers)), budget, steps, dimension
    )


def closed_form_deviations(blocks: Sequence[SensitivitySet]) -> Array:
    """Optimal deviations up to scale: as private as noise of deviation 1 under a sensitivity of 1.

    Theorem 4.6 of the twice-sampling paper, variance proportional to norm / sqrt(rank); with ranks of
    1 it is Theorem 4.5, with one block Theorem 4.3.
    """
    ranks = np.array([block.size for block in blocks], dtype=float)
    norms = np.array([block.l2_radius for block in blocks])
    deviations: Array = np.sqrt(norms / np.sqrt(ranks) * (norms @ np.sqrt(ranks)))
    return deviations


def _closed_form(
    blocks: Sequence[SensitivitySet], rate: float, budget: Budget, steps: int
) -> LeastVarianceNoise:
    plain = Plan(
        sampling=FullBatch() if rate == 1 else Poisson(rate=rate),
        clipping=L2(norm=1.0),
        noise=Gaussian(multiplier=1.0),
    )
    noise = calibrate(plain, budget, steps).noise
    multiplier = float(noise.to_plain()["multiplier"]) * OUTWARD
    ranks, norms = np.array([[block.size, block.l2_radius] for block in blocks], dtype=float).T
    deviations = multiplier * closed_form_deviations(blocks)
    cost = (norms / deviations) ** 2
    variance = ranks * deviations**2
    return LeastVarianceNoise(
        deviations=tuple(deviations.tolist()),
        variance=float(variance.sum()),
        isotropic=float(multiplier**2 * (norms @ norms) * ranks.sum()),
        closed_form=float(variance.sum()),
        residual=float(np.abs(variance / variance.sum() - cost / cost.sum()).max()),
        order=None,
        method="in closed form, scaled by privacy loss distributions",
    )


def _convex_search(
    blocks: Sequence[SensitivitySet],
    rate: float,
    coordinate_rate: float,
    budget: Budget,
    steps: int,
    conversion: Conversion,
) -> LeastVarianceNoise:
    """Theorem 5.6 of the twice-sampling paper, over all orders together."""
    ranks = np.array([block.size for block in blocks], dtype=float)
    divergence_limits = (
        budget.epsilon - conversion_term(WHOLE_ORDERS, budget.delta, conversion)
    ) / steps
    limits = {
        int(a): float(limit)
        for a, limit in zip(WHOLE_ORDERS, divergence_limits, strict=True)
        if limit > 0
    }
    if not limits:
        raise BudgetExceeded(
            f"epsilon={budget.epsilon:g} at delta={budget.delta:g} is less than Rényi divergences give "
            f"at any order up to {WHOLE_ORDERS[-1]:g}, with any noise. Allow a larger budget, or let "
            "all coordinates take part (coordinate_rate=1), which is charged more tightly."
        )
    cost = BlockCost(blocks, rate, coordinate_rate, max(limits), AdjacentPair.POSITIVE)
    closed_form_shape = 2 * np.log(closed_form_deviations(blocks))

    def certified(order: int, log_variances: Array) -> Array:
        return _certified(blocks, log_variances, rate, coordinate_rate, order, limits[order])

    def scaled(shape: Array) -> float:
        total = ranks @ np.exp(shape)
        best = least_variance(ScaledShape(cost, shape), np.array([total]), limits, np.zeros(1))
        return float(ranks @ np.exp(certified(best.order, shape + best.log_variances)))

    optimum = least_variance(cost, ranks, limits, closed_form_shape)
    log_variances = certified(optimum.order, optimum.log_variances)
    return LeastVarianceNoise(
        deviations=tuple(np.exp(log_variances / 2).tolist()),
        variance=float(ranks @ np.exp(log_variances)),
        isotropic=scaled(np.zeros(len(blocks))),
        closed_form=scaled(closed_form_shape),
        residual=optimum.residual,
        order=optimum.order,
        method=f"by convex search at {optimum.solved} of {len(limits)} orders, the others ruled out; "
        f"within {max(0.0, optimum.log_total - optimum.log_least):.0e} of the least",
    )


def _certified(
    blocks: Sequence[SensitivitySet],
    log_variances: Array,
    rate: float,
    coordinate_rate: float,
    order: int,
    limit: float,
) -> Array:
    """The log-variances, raised until the accountant finds their divergence within the limit."""
    for _ in range(_MAX_CORRECTIONS):
        noisy = _noisy_blocks(blocks, np.exp(log_variances / 2))
        divergence = float(CoordinateWise(rate, noisy, coordinate_rate).rdp(np.array([order]))[0])
        if divergence <= limit:
            return log_variances
        # k times the variance costs less than 1/k of the divergence, which is convex in the precision
        log_variances = log_variances + math.log(divergence / limit * OUTWARD)
    raise AssertionError("more noise costs less")


def _noisy_blocks(blocks: Sequence[SensitivitySet], deviations: Array) -> tuple[Block, ...]:
    return tuple(
        Block(2.0, math.sqrt(2) * float(deviation), block)
        for block, deviation in zip(blocks, deviations, strict=True)
    )
