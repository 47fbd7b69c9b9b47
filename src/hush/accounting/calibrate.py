"""Calibration of the noise multiplier or the number of steps to a budget or a risk limit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Protocol, Self, TypeVar, overload

import numpy as np

from hush.accounting.attacker import ApproximateDP, Attacker, Limit, Risk, allowance, stated
from hush.accounting.epsilon import Dimension, charged_steps, upper_epsilon
from hush.accounting.mechanism import mechanism
from hush.accounting.numerics import Array
from hush.core.errors import BudgetExceeded, InvalidValue
from hush.core.guarantee import RECORD, Adjacency, Budget
from hush.core.parts import Always, Noise, SensitivitySet
from hush.core.plan import Plan
from hush.core.release import Selective
from hush.core.value import check_count, check_kind
from hush.noise import BlockGaussian, Gaussian
from hush.sampling import CyclicPoisson, Poisson

# Multipliers outside this range have no practical use.
_MIN_MULTIPLIER, _MAX_MULTIPLIER = 1e-3, 1e9
_MAX_STEPS = 10**12
# Largest relative gap between the limit and the cost of a calibrated plan.
_SLACK = 1e-3
# Number of consecutive interpolations that may fail to halve the bracket before a bisection.
_PATIENCE = 2
# Relative width of the bracket at which the search ends.
_MIN_BRACKET = 1e-6
# An epsilon that is certainly above _CEILING times the budget is not computed accurately.
_CEILING = 8.0

Point = tuple[float, float]

_NOTHING: Mapping[Plan, int] = MappingProxyType({})


class Calibrated(Protocol):
    """Mechanism that scales its own noise, such as `hush.NoisyMax`."""

    def calibrated(self, budget: Budget, queries: int) -> Self:
        """Copy with the least noise to answer this number of queries within the budget."""


Scaled = TypeVar("Scaled", bound=Calibrated)


@overload
def calibrate(
    plan: Plan,
    budget: Limit,
    steps: int,
    dimension: int | None = None,
    *,
    spent: Mapping[Plan, int] = _NOTHING,
    adjacency: Adjacency = RECORD,
) -> Plan: ...


@overload
def calibrate(plan: Scaled, budget: Budget, steps: int) -> Scaled: ...


def calibrate(
    plan: Any,
    budget: Limit,
    steps: int,
    dimension: int | None = None,
    *,
    spent: Mapping[Plan, int] = _NOTHING,
    adjacency: Adjacency = RECORD,
) -> Any:
    """Plan with the smallest noise multiplier for which `steps` steps stay within `budget`.

    Args:
        plan: Plan whose noise multiplier is replaced. A `NoisyMax` or `Confident` is also allowed; then
            `steps` is the number of queries.
        budget: A `Budget` (epsilon and delta), or a `Risk` (limit on an attack).
        steps: Number of steps.
        dimension: Number of parameters, as in `hush.rdp`.
        spent: Number of past steps of each plan that the budget also covers, e.g. `Ledger.counts`. Their
            privacy cost must not depend on a dimension.
        adjacency: Adjacency of the budget, e.g. `hush.Adjacency(group=5)`.

    Returns:
        The plan with the calibrated multiplier.

    **Guarantee.** The upper bound on epsilon is at most `budget.epsilon`, and within 0.1% of it unless
    the smallest multiplier, 0.001, is enough. For a `Risk`, the same is true of the gain of an attack
    over a blind guess. A `Risk` that is satisfied without noise raises `InvalidValue`.

    >>> import hush
    >>> plan = hush.plans.dpsgd(rate=0.01, multiplier=1.0)
    >>> private = hush.calibrate(plan, hush.Budget(epsilon=3.0, delta=1e-5), steps=1000)
    >>> 2.997 <= hush.epsilon(private, steps=1000, delta=1e-5).epsilon.upper <= 3.0
    True
    """
    if hasattr(plan, "calibrated"):
        if spent or dimension is not None or adjacency != RECORD:
            raise InvalidValue(
                f"spent, dimension and adjacency do not apply to a {type(plan).__name__}, which is "
                "calibrated for its own adjacency. Omit them, and pass the remaining budget."
            )
        return plan.calibrated(check_kind("budget", budget, Budget), steps)
    start = check_kind("plan", plan, Plan)
    mechanism(start, dimension)
    most = allowance(budget)
    if not isinstance(spent, Mapping):
        raise InvalidValue(
            f"spent must be a mapping from plans to steps, not a {type(spent).__name__}: the budget "
            "also covers past steps. Pass e.g. spent=ledger.counts.",
            key="spent",
        )
    for earlier in spent:
        # `dimension` applies to the new plan only
        mechanism(check_kind("what was spent", earlier, Plan))
    steps = check_count("steps", steps, "the noise depends on the number of steps", at_least=1)

    if isinstance(budget, Risk) and not spent and isinstance(start.sampling, Poisson | CyclicPoisson):
        # total variation distance is at most the participation probability
        rate, slots = start.sampling.rate, adjacency.slots
        coins = charged_steps(start, steps) * slots
        participation = 1.0 if rate == 1 else -math.expm1(coins * math.log1p(-rate))
        unprotected = ApproximateDP([(0.0, participation)])
        if isinstance(start.release, Always) and budget.gain(unprotected) <= budget.max_gain:
            raise InvalidValue(
                f"{budget} holds without any noise (at most {budget.attained(unprotected):.4g}): at "
                f"rate={rate:g} a record takes part in any of steps={steps} with probability "
                f"{participation:.4g}, so even publishing the sampled records would satisfy it. Set a "
                "smaller limit, or pass an epsilon."
            )

    def with_noise(multiplier: float) -> Plan:
        noise: Noise = start.noise.with_multiplier(multiplier)
        return replace(start, noise=noise)

    def spend(precision: float) -> float:
        noisy = with_noise(1 / precision)
        counts = {**spent, noisy: spent.get(noisy, 0) + steps}
        return _cost(budget, counts, {noisy: dimension} if dimension else None, adjacency, most)

    before = _cost(budget, spent, None, adjacency) if spent else 0.0
    if before > most:
        raise BudgetExceeded(
            f"earlier releases already cost {before / most:.4g} times what {stated(budget)} allows. "
            "Allow a larger budget."
        )
    precision = largest_affordable(
        spend, most, start=1.0, low=1 / _MAX_MULTIPLIER, high=1 / _MIN_MULTIPLIER, whole=False
    )
    if precision is None:
        if isinstance(test := plan.release, Selective):
            alone = _cost(budget, {with_noise(_MAX_MULTIPLIER): steps}, None, adjacency) / most
            raise BudgetExceeded(
                f"the acceptance tests of steps={steps} alone, at rate {test.rate:.3g} with noise "
                f"{test.multiplier:g}, cost {alone:.4g} times what {stated(budget)} allows. Raise the "
                "multiplier of the test (--test-noise) or lower its rate (--test-batch)."
            )
        raise BudgetExceeded(
            f"steps={steps} cost more than {stated(budget)} even with noise {_MAX_MULTIPLIER:g} times "
            "the clipping norm. Use fewer steps or a smaller sampling rate, or allow a larger budget."
        )
    return with_noise(1 / precision)


def fit_noise(
    plan: Plan,
    budget: Limit,
    steps: int,
    dimension: int | None = None,
    *,
    adjacency: Adjacency = RECORD,
) -> Plan:
    """Plan with the Gaussian noise of least total variance, for `steps` steps within `budget`.

    Args:
        plan: Plan whose noise is replaced: by `BlockGaussian` with one multiplier for each block of the
            clipping, or by `Gaussian` if there is one block.
        budget: Limit on epsilon, or on the success of an attack (`hush.Risk`).
        steps: Number of steps that the budget covers.
        dimension: Number of parameters, if the clipping does not determine it.
        adjacency: Adjacency relation and group of the guarantee.

    **Guarantee.** As for `calibrate`. The ratios between the multipliers are optimal if coordinates are
    not sampled: docs/guarantees/shaped-noise.md.

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
    blocks = check_kind("plan", plan, Plan).clipping.sensitivity(dimension)
    noise: Noise = Gaussian(multiplier=1.0)
    if len(blocks) > 1:
        radii = np.array([block.l2_radius for block in blocks])
        noise = BlockGaussian((closed_form_deviations(blocks) / radii).tolist())
    return calibrate(replace(plan, noise=noise), budget, steps, dimension, adjacency=adjacency)


def closed_form_deviations(blocks: Sequence[SensitivitySet]) -> Array:
    """Optimal standard deviation of the noise on each block.

    The noise has the same privacy cost as noise of standard deviation 1 with sensitivity 1. The
    variances are proportional to norm / sqrt(rank): Xiao et al. 2023, Theorem 4.6 (Theorem 4.5 for ranks
    of 1, Theorem 4.3 for a single block).
    """
    ranks = np.array([block.size for block in blocks], dtype=float)
    norms = np.array([block.l2_radius for block in blocks])
    return np.asarray(np.sqrt(norms / np.sqrt(ranks) * (norms @ np.sqrt(ranks))))


def max_steps(
    plan: Plan,
    budget: Limit,
    spent: Mapping[Plan, int] = _NOTHING,
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
) -> int:
    """Largest number of further steps of `plan` within `budget`, after the past steps `spent`.

    The result is at most 10**12, and 0 if the budget does not allow a step.
    """
    most = allowance(budget)

    def spend(further: float) -> float:
        counts = {**spent, plan: spent.get(plan, 0) + int(further)}
        return _cost(budget, counts, dimension, adjacency, most)

    if spend(1) > most:
        return 0
    return int(largest_affordable(spend, most, start=1e3, low=1.0, high=_MAX_STEPS, whole=True) or 0)


def _cost(
    limit: Limit,
    counts: Mapping[Plan, int],
    dimension: Dimension,
    adjacency: Adjacency,
    most: float = math.inf,
) -> float:
    """Upper bound on the cost of a composition: epsilon, or the gain of an attack."""
    if isinstance(limit, Risk):
        return limit.gain(Attacker(counts, dimension, adjacency))
    return upper_epsilon(counts, limit.delta, dimension, adjacency, ceiling=_CEILING * most)


def largest_affordable(
    cost: Callable[[float], float], limit: float, *, start: float, low: float, high: float, whole: bool
) -> float | None:
    """Largest argument in [low, high] with a `cost` of at most `limit`, or None. `cost` must increase.

    Integer arguments are exact (`whole`). Other arguments are refined until the cost is within `_SLACK`
    of the limit, or until an argument within `_MIN_BRACKET` exceeds the limit.
    """
    inside = outside = start
    inside_cost = outside_cost = cost(start)
    # The last replaced end of the bracket is the third interpolation point.
    previous = (start, math.inf)
    max_ratio = 1.0
    while inside_cost > limit:
        if inside == low:
            return None
        # Smaller arguments are cheaper to evaluate, so the step size may increase.
        max_ratio *= 8.0
        previous = (outside, outside_cost)
        outside, outside_cost = inside, inside_cost
        inside = max(low, inside / min(max_ratio, 1.2 * outside_cost / limit))
        inside_cost = cost(inside)
    while outside_cost <= limit:
        if outside == high:
            return high
        previous = (inside, inside_cost)
        inside, inside_cost = outside, outside_cost
        outside = min(high, outside * min(8.0, 1.2 * limit / inside_cost if inside_cost else 8.0))
        outside_cost = cost(outside)

    target = limit if whole else limit * (1 - _SLACK / 2)
    slow = 0
    while (outside - inside > 1) if whole else (inside_cost < limit * (1 - _SLACK)):
        share = 0.5
        if slow < _PATIENCE:
            share = _interpolate((inside, inside_cost), (outside, outside_cost), previous, target)
        trial = inside * (outside / inside) ** share
        if whole:
            trial = min(max(math.floor(trial), inside + 1), outside - 1)
        elif outside < inside * (1 + _MIN_BRACKET):
            # the cost jumps over the budget here, e.g. at very small sampling rates
            break
        trial_cost, bracket = cost(trial), outside / inside
        if trial_cost <= limit:
            previous, inside, inside_cost = (inside, inside_cost), trial, trial_cost
        else:
            previous, outside, outside_cost = (outside, outside_cost), trial, trial_cost
        halved = math.log(outside / inside) <= 0.5 * math.log(bracket)
        slow = 0 if share == 0.5 or halved else slow + 1
    return inside


def _interpolate(inside: Point, outside: Point, previous: Point, target: float) -> float:
    """Estimated position of the `target` cost between two points, as a fraction of their log-ratio.

    Uses inverse quadratic interpolation in log space, with linear interpolation and 1/2 as fallbacks.
    Every fraction is valid.
    """
    usable = [point for point in (inside, outside, previous) if 0 < point[1] < math.inf]
    if inside not in usable or outside not in usable:
        return 0.5
    places = [math.log(x / inside[0]) / math.log(outside[0] / inside[0]) for x, _ in usable]
    heights = [math.log(cost / target) for _, cost in usable]
    for points in (len(usable), 2):
        if len(set(heights[:points])) < points:
            continue
        share = 0.0
        for k in range(points):
            other_heights = [heights[j] for j in range(points) if j != k]
            share += places[k] * math.prod(y / (y - heights[k]) for y in other_heights)
        if 0 < share < 1:
            return share
    return 0.5
