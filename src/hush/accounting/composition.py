"""Two-sided bounds on epsilon and delta of composed steps, for records, groups and replacement.

Steps with a dominating pair are composed by privacy loss distributions (`pld`), and other steps by Rényi
divergences. If a dominating pair is known for all steps, the smaller of the two bounds is used. Groups
and replacement: docs/guarantees/groups.md.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hush.accounting.numerics import Array, bisect, probability_of_any
from hush.accounting.pld import accountant
from hush.accounting.pld.privacy_loss import GroupLaw, Step
from hush.accounting.rdp.conversion import ORDERS, rdp_to_delta, rdp_to_epsilon
from hush.accounting.rdp.coordinatewise import WHOLE_ORDERS
from hush.accounting.steps import ComposableStep, PairedStep
from hush.core.guarantee import RECORD, Adjacency, Bound

Counts = Mapping[ComposableStep, int]
"""Number of executions of each step."""

# High orders are expensive, so a few more orders are evaluated at a time, while they may improve.
_ORDER_STRIDE = 6
_EXTRAPOLATED_FROM = 4
_STAGES = (8, 14, 20, 26, *range(31, len(WHOLE_ORDERS), 3), len(WHOLE_ORDERS))
# RDP of trials is known at every order above 1, and low orders are best for a large epsilon.
_TRIAL_ORDERS: Array = np.append([1.1, 1.2, 1.35, 1.5, 1.75], WHOLE_ORDERS)
# Smallest log delta for the group property, and tolerance of the search for epsilon.
_LOG_MIN_DELTA, _TOLERANCE = -660.0, 1e-4
_MAX_PROFILE_EPSILON = 600.0
_ROUNDING = 1e-12


def epsilon_bound(steps: Counts, adjacency: Adjacency, delta: float) -> Bound:
    """Bounds on epsilon at `delta` of a composition. Requires a proof of the cost under `adjacency`."""
    if adjacency.group * participation_probability(steps) <= delta:
        return Bound(lower=0.0, upper=0.0)
    bound = accountant.epsilon(dominated_steps(steps, adjacency), delta)
    if not requires_rdp(steps):
        return bound
    if adjacency.slots == 1:
        return _consistent(bound.lower, epsilon_upper(steps, delta))
    upper = chained_epsilon(lambda share: epsilon_upper(steps, share), adjacency.slots, delta)
    if (pairs := _dominating_steps(steps, adjacency)) is not None:
        upper = min(upper, accountant.epsilon(pairs, delta).upper)
    return _consistent(bound.lower, upper)


def delta_bounds(steps: Counts, adjacency: Adjacency, epsilons: Sequence[float]) -> list[Bound]:
    """Bounds on delta of a composition at increasing `epsilons`.

    The cost must be proved for the adjacency.
    """
    bounds = accountant.profile(dominated_steps(steps, adjacency), epsilons)
    if not requires_rdp(steps):
        return bounds
    if adjacency.slots == 1:
        uppers = delta_uppers(steps, epsilons)
    else:
        uppers = [
            chained_delta(lambda share: delta_uppers(steps, [share])[0], adjacency.slots, epsilon)
            for epsilon in epsilons
        ]
        uppers = _smaller(uppers, _dominating_steps(steps, adjacency), epsilons)
    return [_consistent(bound.lower, upper) for bound, upper in zip(bounds, uppers, strict=True)]


def _consistent(lower: float, upper: float) -> Bound:
    """Bound from the results of two accountants; raises if they contradict each other."""
    if lower > upper * (1 + 1e-6) + 1e-9:
        raise ArithmeticError(f"the lower bound {lower:g} contradicts the upper bound {upper:g}")
    return Bound(lower=min(lower, upper), upper=upper)


def requires_rdp(steps: Counts) -> bool:
    """Whether the upper bound needs RDP, because a step has no exact dominating pair."""
    return any(step.dominating_step != step for step in steps)


def epsilon_upper(steps: Counts, delta: float, ceiling: float = math.inf) -> float:
    """Upper bound on epsilon at `delta` of steps that require RDP, for one record.

    Returns infinity if epsilon certainly exceeds `ceiling`.
    """
    # hidden trials may not terminate: docs/guarantees/selective.md, step 6
    failure = sum(count * step.nontermination for step, count in steps.items())
    upper = math.inf
    if failure < delta:
        upper = 2 * failure + _best_order(
            steps,
            lambda total, orders: rdp_to_epsilon(total, orders, delta - failure),
            lambda dominated: accountant.epsilon(dominated, delta).lower,
            ceiling,
        )
    if list(steps.values()) == [1]:
        alone = next(iter(steps))
        upper = min(
            upper,
            _first_within(
                lambda epsilon: alone.delta_upper(epsilon) > delta, 1.0, _MAX_PROFILE_EPSILON, 1e-6
            ),
        )
    dominating = _dominating_steps(steps)
    return upper if dominating is None else min(upper, accountant.epsilon(dominating, delta).upper)


def delta_uppers(steps: Counts, epsilons: Sequence[float]) -> list[float]:
    """Upper bounds on delta at increasing epsilons; dominating pairs are composed only once."""
    failure = sum(count * step.nontermination for step, count in steps.items())
    profile = functools.cache(lambda dominated: accountant.profile(dict(dominated), epsilons))

    def upper_at(k: int) -> float:
        return _best_order(
            steps,
            lambda total, orders: rdp_to_delta(total, orders, max(0.0, epsilons[k] - 2 * failure)),
            lambda dominated: profile(tuple(dominated.items()))[k].lower,
        )

    # an epsilon of 0 cannot be reduced, so the correction is added to delta
    uppers = [upper_at(k) + 3 * failure for k in range(len(epsilons))]
    if list(steps.values()) == [1]:
        alone = next(iter(steps))
        uppers = [min(pair) for pair in zip(uppers, map(alone.delta_upper, epsilons), strict=True)]
    uppers = _smaller(uppers, _dominating_steps(steps), epsilons)
    participation = participation_probability(steps)
    return [min(upper, participation) for upper in uppers]


def _smaller(
    uppers: list[float], dominating: dict[Step, int] | None, epsilons: Sequence[float]
) -> list[float]:
    """Minimum of each bound and the bound from the dominating steps, if these are known."""
    if dominating is None:
        return uppers
    bounds = accountant.profile(dominating, epsilons)
    return [min(upper, bound.upper) for upper, bound in zip(uppers, bounds, strict=True)]


def participation_probability(steps: Counts) -> float:
    """Probability that a record is sampled in any step: an upper bound on delta."""
    return probability_of_any((step.participation, count) for step, count in steps.items())


def dominated_steps(steps: Counts, adjacency: Adjacency = RECORD) -> dict[Step, int]:
    """Steps with a dominating pair that are dominated by these steps, for lower bounds.

    Steps without such a pair are omitted.
    """
    dominated: Counter[Step] = Counter()
    for step, count in steps.items():
        replaced = step.dominated_step_of_replaced
        pair = step.dominated_step_of_one if adjacency.slots == 1 else step.dominated_step
        if replaced is not None:
            # the draws of a group depend on each other: one of its records
            dominated[replaced if adjacency.replaced or pair is None else pair] += count
        elif pair is not None:
            dominated[_group_step(pair, adjacency)] += count
        for part, repeats in step.dominated_composition:
            dominated[_group_step(part, adjacency)] += count * repeats
    return dict(dominated)


def _dominating_steps(steps: Counts, adjacency: Adjacency = RECORD) -> dict[Step, int] | None:
    """Steps with a dominating pair that dominate these steps; None if a pair is unknown."""
    dominating: Counter[Step] = Counter()
    for step, count in steps.items():
        replaced = step.dominating_step_of_replaced
        if replaced is not None and adjacency.replaced and adjacency.group == 1:
            dominating[replaced] += count
            continue
        pair = step.dominating_step_of_one if adjacency.slots == 1 else step.dominating_step
        if pair is None:
            return None
        dominating[_group_step(pair, adjacency)] += count
    return dict(dominating)


def composed_rdp(steps: Counts, orders: Array) -> Array:
    """Rényi divergences of the composition, which are sums over the steps."""
    total = np.zeros(len(orders))
    for step, count in steps.items():
        total += count * _step_rdp(step, tuple(orders))
    return total


def _best_order(
    steps: Counts,
    convert: Callable[[Array, Array], float],
    lower_bound: Callable[[Mapping[Step, int]], float],
    ceiling: float = math.inf,
) -> float:
    """Smallest value of `convert` over the orders, with or without subsampling.

    Subsampling never increases a divergence, but more orders are available without subsampling. The
    search uses `lower_bound` to skip orders that cannot improve the result, and returns infinity if the
    cost certainly exceeds `ceiling`.
    """
    if not any(step.needs_whole_orders for step in steps):
        return convert(composed_rdp(steps, _TRIAL_ORDERS), _TRIAL_ORDERS)
    unsampled: Counter[ComposableStep] = Counter()
    for step, count in steps.items():
        unsampled[step.unsampled] += count
    best = math.inf
    for stage in _STAGES if unsampled != steps else ():
        orders, higher = WHOLE_ORDERS[:stage], WHOLE_ORDERS[stage:]
        total = composed_rdp(steps, orders)
        best = min(best, convert(total, orders))
        if stage == _STAGES[0] and best > ceiling and lower_bound(dominated_steps(steps)) > ceiling:
            return math.inf
        if not len(higher) or convert(_extrapolate(total, orders, higher), higher) >= best:
            break
    dominated = dominated_steps(unsampled)
    if lower_bound(dominated) < best:
        sparse = np.arange(0, len(ORDERS), _ORDER_STRIDE)
        orders = ORDERS[sparse]
        total = composed_rdp(unsampled, orders)
        values = [convert(total[k : k + 1], orders[k : k + 1]) for k in range(len(sparse))]
        # every order gives a valid bound; the best order is near the best of a sparse set
        near = sparse[int(np.argmin(values))]
        nearby = ORDERS[max(0, near - _ORDER_STRIDE) : near + _ORDER_STRIDE]
        best = min(best, convert(composed_rdp(unsampled, nearby), nearby))
    return best


def _extrapolate(divergences: Array, orders: Array, higher: Array) -> Array:
    """Lower estimate of the divergences at `higher` orders, by linear extrapolation.

    (a - 1) D_a is convex in a. Bounds on D_a may be larger at odd orders than at even orders, so the
    flattest of several lines is used.
    """
    if not np.isfinite(divergences[-_EXTRAPOLATED_FROM:]).all():
        return np.full(len(higher), np.inf)
    a, moments = orders[-_EXTRAPOLATED_FROM:], ((orders - 1) * divergences)[-_EXTRAPOLATED_FROM:]
    lines = [
        moments[k] + (moments[k] - moments[j]) / (a[k] - a[j]) * (higher - a[k])
        for k in (len(a) - 2, len(a) - 1)
        for j in range(k)
    ]
    return np.asarray(np.maximum(np.min(lines, axis=0), 0.0) / (higher - 1))


@functools.lru_cache(maxsize=64)
def _step_rdp(step: ComposableStep, orders: tuple[float, ...]) -> Array:
    """Rényi divergence of one step at each order."""
    return step.rdp(np.array(orders))


def _group_step(step: Step, adjacency: Adjacency) -> Step:
    if adjacency.slots == 1 or not isinstance(step, PairedStep):
        return step
    if step.rate == 1:
        return step.divided(adjacency.slots)
    return GroupLaw(step.noise, step.rate, adjacency.group, adjacency.replaced)


def chained_delta(upper: Callable[[float], float], changes: int, epsilon: float) -> float:
    """Upper bound on delta at `epsilon` for a group; `upper` maps epsilon to delta for one change.

    Group property (Vadhan 2017, Lemma 2.2), with epsilon split equally between the changes.
    """
    share = epsilon / changes
    return min(1.0, upper(share) * math.exp(min(_log_chain_factor(share, changes), 700.0)))


def chained_epsilon(upper: Callable[[float], float], changes: int, delta: float) -> float:
    """Upper bound on epsilon at `delta` for a group; `upper` maps delta to epsilon for one change."""

    def costs_more(share: float) -> bool:
        log_delta = math.log(delta) - _log_chain_factor(share, changes)
        return log_delta < _LOG_MIN_DELTA or upper(math.exp(log_delta)) > share

    return changes * _first_within(costs_more, 1e-3, -_LOG_MIN_DELTA, _TOLERANCE)


def _first_within(exceeds: Callable[[float], bool], high: float, most: float, tolerance: float) -> float:
    """Smallest epsilon for which `exceeds` is false, to a tolerance; infinite if above `most`."""
    while exceeds(high):
        high *= 2
        if high > most:
            return math.inf
    return bisect(exceeds, 0.0, high, tolerance=tolerance)[1]


def _log_chain_factor(share: float, changes: int) -> float:
    """log(1 + e^share + ... + e^((changes - 1) share)), rounded up."""
    if share == 0:
        return math.log(changes) + _ROUNDING
    ratio = math.expm1(-changes * share) / math.expm1(-share)
    return (changes - 1) * share * (1 + _ROUNDING) + math.log(ratio) + _ROUNDING
