"""The inverse questions: which noise, rate or number of steps a budget allows."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from hush.accounting import epsilon as charge
from hush.accounting.mechanism import mechanism
from hush.core.errors import BudgetExceeded, InvalidValue
from hush.core.guarantee import Budget
from hush.core.plan import Plan
from hush.core.ranges import check_count, check_kind
from hush.sampling import Poisson

# Multipliers and step counts beyond these are no use to anyone.
_LEAST_NOISE, _MOST_NOISE = 1e-3, 1e9
_MOST_STEPS = 10**12
_LEAST_RATE = 1e-9
# How far below the budget a calibrated charge may end, relatively.
_SLACK = 1e-3
# Interpolations in a row that may fail to halve the bracket before it is bisected.
_PATIENCE = 2
# A bracket narrower than this, relatively, is not worth a further evaluation.
_NARROW = 1e-6
# A cost that is certainly this many times the budget need not be known more closely.
_FAR = 8.0

Point = tuple[float, float]

_NOTHING: Mapping[Plan, int] = MappingProxyType({})


def calibrate(
    plan: Plan,
    budget: Budget,
    steps: int,
    dimension: int | None = None,
    *,
    spent: Mapping[Plan, int] = _NOTHING,
) -> Plan:
    """The same plan with the least noise for which `steps` steps stay within `budget`.

    **Guarantee.** The upper bound on epsilon is at most `budget.epsilon`, and within 0.1% of it
    unless a multiplier of 0.001, the least considered, is private enough already. `dimension` as in
    `hush.rdp`. What was `spent` before, as `Ledger.counts` has it, is within the budget too;
    not where a charge of it depends on a dimension.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Poisson(rate=0.01),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=1.0),
    ... )
    >>> private = hush.calibrate(plan, hush.Budget(epsilon=3.0, delta=1e-5), steps=1000)
    >>> 2.997 <= hush.epsilon(private, steps=1000, delta=1e-5).epsilon.upper <= 3.0
    True
    """
    mechanism(check_kind("plan", plan, Plan), dimension)
    check_kind("budget", budget, Budget)
    if not isinstance(spent, Mapping):
        raise InvalidValue(
            f"spent must be plans and how often each was run, not a {type(spent).__name__}: all of it "
            "is part of what the budget bounds. Pass e.g. spent=ledger.counts.",
            key="spent",
        )
    for run in spent:
        # a dimension is that of what is still to be trained: nothing here says theirs
        mechanism(check_kind("what was spent", run, Plan))
    steps = check_count("steps", steps, "with no step there is no noise to choose", at_least=1)

    def with_noise(multiplier: float) -> Plan:
        return replace(plan, noise=plan.noise.with_multiplier(multiplier))

    def cost(precision: float) -> float:
        noisy, counts = with_noise(1 / precision), Counter(spent)
        counts[noisy] += steps
        size = {noisy: dimension} if dimension else None
        return charge.upper_epsilon(counts, budget.delta, size, ceiling=_FAR * budget.epsilon)

    before = charge.upper_epsilon(spent, budget.delta) if spent else 0.0
    if before > budget.epsilon:
        raise BudgetExceeded(
            f"epsilon={before:g} was spent before, more than epsilon={budget.epsilon:g} at "
            f"delta={budget.delta:g}: what is released cannot be taken back. Allow a larger budget."
        )
    precision = largest(
        cost, budget.epsilon, start=1.0, low=1 / _MOST_NOISE, high=1 / _LEAST_NOISE, whole=False
    )
    if precision is None:
        raise BudgetExceeded(
            f"steps={steps} cost more than epsilon={budget.epsilon:g} at delta={budget.delta:g} even "
            f"with noise {_MOST_NOISE:g} times the clipping norm: every step reveals something, "
            "and that many add up to more than the budget. Take fewer steps, sample at a smaller rate, "
            "or allow a larger budget."
        )
    return with_noise(1 / precision)


def steps_within(
    plan: Plan,
    budget: Budget,
    spent: Mapping[Plan, int] = _NOTHING,
    dimension: charge.Dimension = None,
) -> int:
    """How many further steps of `plan` fit in `budget` after what was `spent`; 0 if none does.

    Never more than 10**12.
    """
    mechanism(plan, dimension.get(plan) if isinstance(dimension, Mapping) else dimension)

    def cost(further: float) -> float:
        counts = Counter(spent)
        counts[plan] += int(further)
        return charge.upper_epsilon(counts, budget.delta, dimension, ceiling=_FAR * budget.epsilon)

    if cost(1) > budget.epsilon:
        return 0
    found = largest(cost, budget.epsilon, start=1e3, low=1.0, high=_MOST_STEPS, whole=True)
    return int(found or 0)


def rate_within(plan: Plan, budget: Budget, steps: int, dimension: int | None = None) -> Plan:
    """The same plan with the largest Poisson rate for which `steps` steps stay within `budget`.

    **Guarantee.** As for `calibrate`; the rate is 1 where even that fits.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.FullBatch(),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=1.0),
    ... )
    >>> private = rate_within(plan, hush.Budget(epsilon=3.0, delta=1e-5), steps=1000)
    >>> 2.997 <= hush.epsilon(private, steps=1000, delta=1e-5).epsilon.upper <= 3.0
    True
    """
    steps = check_count("steps", steps, "with no step there is no rate to choose", at_least=1)

    def with_rate(rate: float) -> Plan:
        return replace(plan, sampling=Poisson(rate=rate))

    def cost(rate: float) -> float:
        counts = {with_rate(rate): steps}
        return charge.upper_epsilon(counts, budget.delta, dimension, ceiling=_FAR * budget.epsilon)

    rate = largest(cost, budget.epsilon, start=0.01, low=_LEAST_RATE, high=1.0, whole=False)
    if rate is None:
        raise BudgetExceeded(
            f"steps={steps} cost more than epsilon={budget.epsilon:g} at delta={budget.delta:g} even at "
            f"a rate of {_LEAST_RATE:g}: with so little noise whoever takes part is seen. Add noise, "
            "take fewer steps, or allow a larger budget."
        )
    return with_rate(rate)


def largest(
    cost: Callable[[float], float],
    limit: float,
    *,
    start: float,
    low: float,
    high: float,
    whole: bool,
) -> float | None:
    """The largest argument in [low, high] whose rising `cost` is within `limit`, or None.

    Whole arguments are found exactly, others until the cost is within `_SLACK` of the limit, or the
    argument within `_NARROW` of one that costs more.
    """
    inside = outside = start
    inside_cost = outside_cost = cost(start)
    # The end of the bracket that was replaced last: a third point to interpolate through.
    spare = (start, math.inf)
    most = 1.0
    while inside_cost > limit:
        if inside == low:
            return None
        # A smaller argument is cheaper to price, so that going too far is cheaper than many moves.
        most *= 8.0
        spare = (outside, outside_cost)
        outside, outside_cost = inside, inside_cost
        inside = max(low, inside / min(most, 1.2 * outside_cost / limit))
        inside_cost = cost(inside)
    while outside_cost <= limit:
        if outside == high:
            return high
        spare = (inside, inside_cost)
        inside, inside_cost = outside, outside_cost
        outside = min(high, outside * min(8.0, 1.2 * limit / inside_cost if inside_cost else 8.0))
        outside_cost = cost(outside)

    aim = limit if whole else limit * (1 - _SLACK / 2)
    slow = 0
    while (outside - inside > 1) if whole else (inside_cost < limit * (1 - _SLACK)):
        share = 0.5
        if slow < _PATIENCE:
            share = _share((inside, inside_cost), (outside, outside_cost), spare, aim)
        trial = inside * (outside / inside) ** share
        if whole:
            trial = min(max(math.floor(trial), inside + 1), outside - 1)
        elif outside < inside * (1 + _NARROW):
            # the cost jumps over the budget here, as it does where too little is sampled to be seen
            break
        price, before = cost(trial), outside / inside
        if price <= limit:
            spare, inside, inside_cost = (inside, inside_cost), trial, price
        else:
            spare, outside, outside_cost = (outside, outside_cost), trial, price
        slow = slow + 1 if share != 0.5 and math.log(outside / inside) > 0.5 * math.log(before) else 0
    return inside


def _share(inside: Point, outside: Point, spare: Point, aim: float) -> float:
    """Where between `inside` and `outside` the cost is about `aim`, as a share of their log-ratio.

    Inverse quadratic interpolation in logarithms, in which costs are nearly straight lines; else linear;
    else one half. Any share is sound: what is tried is priced.
    """
    known = [point for point in (inside, outside, spare) if 0 < point[1] < math.inf]
    if inside not in known or outside not in known:
        return 0.5
    places = [math.log(x / inside[0]) / math.log(outside[0] / inside[0]) for x, _ in known]
    heights = [math.log(cost / aim) for _, cost in known]
    for points in (len(known), 2):
        if len(set(heights[:points])) < points:
            continue
        share = 0.0
        for k in range(points):
            others = [heights[j] for j in range(points) if j != k]
            share += places[k] * math.prod(y / (y - heights[k]) for y in others)
        if 0 < share < 1:
            return share
    return 0.5
