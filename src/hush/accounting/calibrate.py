"""Calibration: the noise multiplier, sampling rate or number of steps that a budget or a risk allows."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from hush.accounting.attacker import ApproximateDP, Attacker, Limit, Risk, allowance, stated
from hush.accounting.epsilon import Dimension, upper_epsilon
from hush.accounting.mechanism import mechanism
from hush.core.errors import BudgetExceeded, InvalidValue
from hush.core.guarantee import RECORD, Adjacency
from hush.core.parts import Always
from hush.core.plan import Plan
from hush.core.value import check_count, check_kind
from hush.sampling import Poisson

# Multipliers and step counts beyond these are of no practical use.
_MIN_MULTIPLIER, _MAX_MULTIPLIER = 1e-3, 1e9
_MAX_STEPS = 10**12
_MIN_RATE = 1e-9
# How far below the limit a calibrated cost may end, relatively.
_SLACK = 1e-3
# Interpolations in a row that may fail to halve the bracket before it is bisected.
_PATIENCE = 2
# A bracket narrower than this, relatively, is not worth a further evaluation.
_MIN_BRACKET = 1e-6
# An epsilon that is certainly this many times the budget need not be known more closely.
_CEILING = 8.0

Point = tuple[float, float]

_NOTHING: Mapping[Plan, int] = MappingProxyType({})


def calibrate(
    plan: Plan,
    budget: Limit,
    steps: int,
    dimension: int | None = None,
    *,
    spent: Mapping[Plan, int] = _NOTHING,
    adjacency: Adjacency = RECORD,
) -> Plan:
    """The plan with the smallest noise multiplier that keeps `steps` steps within `budget`.

    Args:
        plan: Sampling, clipping, noise and release; its multiplier is replaced.
        budget: Epsilon and delta that may be spent; or a `Risk`, the attack that may succeed.
        steps: Number of steps.
        dimension: Number of parameters, as in `hush.rdp`.
        spent: Steps of each plan charged before, e.g. `Ledger.counts`, which the budget covers too.
            Their charge may not depend on a dimension.
        adjacency: Adjacency of the budget, e.g. `hush.Adjacency(group=5)`.

    Returns:
        The plan with the calibrated multiplier.

    **Guarantee.** The upper bound on epsilon is at most `budget.epsilon`, and within 0.1% of it unless a
    multiplier of 0.001 is private enough already. The same holds for the gain over a blind guess that a
    `Risk` allows. A `Risk` that holds without any noise raises `InvalidValue`.

    >>> import hush
    >>> plan = hush.plans.dpsgd(rate=0.01, multiplier=1.0)
    >>> private = hush.calibrate(plan, hush.Budget(epsilon=3.0, delta=1e-5), steps=1000)
    >>> 2.997 <= hush.epsilon(private, steps=1000, delta=1e-5).epsilon.upper <= 3.0
    True
    """
    mechanism(check_kind("plan", plan, Plan), dimension)
    most = allowance(budget)
    if not isinstance(spent, Mapping):
        raise InvalidValue(
            f"spent must be a mapping from plans to steps, not a {type(spent).__name__}: the budget "
            "covers past steps too. Pass e.g. spent=ledger.counts.",
            key="spent",
        )
    for earlier in spent:
        # `dimension` belongs to the model still to be trained
        mechanism(check_kind("what was spent", earlier, Plan))
    steps = check_count("steps", steps, "with no step there is no noise to choose", at_least=1)

    if isinstance(budget, Risk) and not spent and isinstance(plan.sampling, Poisson):
        # the total variation distance is at most the probability that the record takes part
        rate, slots = plan.sampling.rate, adjacency.slots
        participation = 1.0 if rate == 1 else -math.expm1(steps * slots * math.log1p(-rate))
        unprotected = ApproximateDP([(0.0, participation)])
        if isinstance(plan.release, Always) and budget.gain(unprotected) <= budget.max_gain:
            raise InvalidValue(
                f"{budget} holds without any noise (at most {budget.attained(unprotected):.4g}): at "
                f"rate={rate:g} a record takes part in any of steps={steps} with probability "
                f"{participation:.4g}, and releasing it outright would meet the limit. Set a smaller "
                "limit, or pass an epsilon."
            )

    def with_noise(multiplier: float) -> Plan:
        return replace(plan, noise=plan.noise.with_multiplier(multiplier))

    def spend(precision: float) -> float:
        noisy = with_noise(1 / precision)
        counts = {**spent, noisy: spent.get(noisy, 0) + steps}
        return _cost(budget, counts, {noisy: dimension} if dimension else None, adjacency, most)

    before = _cost(budget, spent, None, adjacency) if spent else 0.0
    if before > most:
        raise BudgetExceeded(
            f"{before / most:.4g} times what {stated(budget)} allows was spent before: past releases "
            "count. Allow a larger budget."
        )
    precision = largest_affordable(
        spend, most, start=1.0, low=1 / _MAX_MULTIPLIER, high=1 / _MIN_MULTIPLIER, whole=False
    )
    if precision is None:
        raise BudgetExceeded(
            f"steps={steps} cost more than {stated(budget)} even with noise {_MAX_MULTIPLIER:g} times "
            "the clipping norm. Take fewer steps, sample at a smaller rate, or allow a larger budget."
        )
    return with_noise(1 / precision)


def max_steps(
    plan: Plan,
    budget: Limit,
    spent: Mapping[Plan, int] = _NOTHING,
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
) -> int:
    """The largest number of further steps of `plan` that `budget` allows after `spent`.

    At most 10**12; 0 if not even one step fits.
    """
    most = allowance(budget)

    def spend(further: float) -> float:
        counts = {**spent, plan: spent.get(plan, 0) + int(further)}
        return _cost(budget, counts, dimension, adjacency, most)

    if spend(1) > most:
        return 0
    return int(largest_affordable(spend, most, start=1e3, low=1.0, high=_MAX_STEPS, whole=True) or 0)


def max_rate(
    plan: Plan, budget: Limit, steps: int, dimension: int | None = None, adjacency: Adjacency = RECORD
) -> Plan:
    """The plan with the largest Poisson sampling rate that keeps `steps` steps within `budget`.

    **Guarantee.** As for `calibrate`.
    """
    steps = check_count("steps", steps, "with no step there is no rate to choose", at_least=1)

    def with_rate(rate: float) -> Plan:
        return replace(plan, sampling=Poisson(rate=rate))

    most = allowance(budget)

    def spend(rate: float) -> float:
        return _cost(budget, {with_rate(rate): steps}, dimension, adjacency, most)

    rate = largest_affordable(spend, most, start=0.01, low=_MIN_RATE, high=1.0, whole=False)
    if rate is None:
        raise BudgetExceeded(
            f"steps={steps} cost more than {stated(budget)} even at a rate of {_MIN_RATE:g}: with so "
            "little noise every participant is detected. Add noise, take fewer steps, or allow a larger "
            "budget."
        )
    return with_rate(rate)


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
    """The largest argument in [low, high] with an increasing `cost` of at most `limit`, or None.

    Whole arguments are exact; others are refined until the cost is within `_SLACK` of the limit, or
    the argument within `_MIN_BRACKET` of one that costs more.
    """
    inside = outside = start
    inside_cost = outside_cost = cost(start)
    # The end of the bracket that was replaced last: a third point to interpolate through.
    previous = (start, math.inf)
    max_ratio = 1.0
    while inside_cost > limit:
        if inside == low:
            return None
        # A smaller argument is cheaper to evaluate: one step too far costs less than many short ones.
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
            # the cost jumps over the budget here, as it does where too little is sampled to be seen
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
    """Estimated place of the `target` cost between two points, as a share of their log-ratio.

    Inverse quadratic interpolation in logarithms; else linear; else one half. Any share is sound.
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
