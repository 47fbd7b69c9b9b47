"""Group privacy and replacement: the cost of changes larger than one slot emptied.

**Guarantee.** docs/guarantees/groups.md. Steps with a dominating pair have one for a group and for
replaced records too: exact. Without sampling a group shifts the sum that many times as far. What is
left, coordinate-wise noise under sampling and selective trials, is bounded by the group property.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hush.accounting import renyi_composition as renyi
from hush.accounting.numerics import bisect
from hush.accounting.pld import accountant
from hush.accounting.pld.group_law import GroupLaw
from hush.accounting.pld.privacy_loss import Step
from hush.accounting.steps import ComposableStep, PairedStep
from hush.core.guarantee import Adjacency, Bound

Counts = Mapping[ComposableStep, int]

# The group property is not used at deltas below this, and epsilon is searched to this gap.
_LOG_MIN_DELTA, _TOLERANCE = -660.0, 1e-4
_ROUNDING = 1e-12


@dataclass(frozen=True)
class SampledGroup:
    """Poisson-subsampled noise where the slots of `size` records change together.

    Each of them is drawn on its own, and `single` is the step for one.

    **Guarantee.** docs/guarantees/groups.md: exact, where each of the records is removed, and where each
    is `replaced` by another one.
    """

    single: PairedStep
    size: int
    replaced: bool

    @property
    def rate(self) -> float:
        """Probability that any of the records is drawn."""
        return -math.expm1(self.size * math.log1p(-self.single.rate))

    @property
    def law(self) -> GroupLaw:
        return GroupLaw(self.single.law, self.single.rate, self.size, self.replaced)

    def with_representable_loss(self) -> "SampledGroup":
        # the largest losses are those of the shift with all of them drawn
        shift = 2 * self.size if self.replaced else self.size
        scaled = self.single.divided(shift)
        representable = scaled.with_representable_loss()
        if representable == scaled:
            return self
        return replace(self, single=representable.divided(1 / shift))


def epsilon_bound(steps: Counts, adjacency: Adjacency, delta: float) -> Bound:
    """Bounds on epsilon at `delta` of a composition of mechanisms, for a change."""
    if adjacency.group * renyi.participation_probability(steps) <= delta:
        return Bound(lower=0.0, upper=0.0)
    if adjacency.slots == 1:
        bound = accountant.epsilon(renyi.dominated_steps(steps), delta)
        if renyi.requires_rdp(steps):
            bound = _consistent(bound.lower, renyi.epsilon_upper(steps, delta))
        return bound
    bound = accountant.epsilon(dominated_pairs(steps, adjacency), delta)
    if renyi.requires_rdp(steps):
        upper = chained_epsilon(lambda share: renyi.epsilon_upper(steps, share), adjacency.slots, delta)
        if (pairs := dominating_pairs(steps, adjacency)) is not None:
            upper = min(upper, accountant.epsilon(pairs, delta).upper)
        bound = _consistent(bound.lower, upper)
    return bound


def delta_bounds(steps: Counts, adjacency: Adjacency, epsilons: Sequence[float]) -> list[Bound]:
    """Bounds on delta of a composition of mechanisms at increasing `epsilons`, for a change."""
    if adjacency.slots == 1:
        bounds = accountant.profile(renyi.dominated_steps(steps), epsilons)
        if renyi.requires_rdp(steps):
            uppers = renyi.delta_uppers(steps, epsilons)
            bounds = [
                _consistent(bound.lower, upper) for bound, upper in zip(bounds, uppers, strict=True)
            ]
        return bounds
    bounds = accountant.profile(dominated_pairs(steps, adjacency), epsilons)
    if renyi.requires_rdp(steps):
        uppers = [
            chained_delta(lambda share: renyi.delta_upper(steps, share), adjacency.slots, epsilon)
            for epsilon in epsilons
        ]
        if (pairs := dominating_pairs(steps, adjacency)) is not None:
            exact = accountant.profile(pairs, epsilons)
            uppers = [min(upper, bound.upper) for upper, bound in zip(uppers, exact, strict=True)]
        bounds = [_consistent(bound.lower, upper) for bound, upper in zip(bounds, uppers, strict=True)]
    return bounds


def _consistent(lower: float, upper: float) -> Bound:
    """The bound between the ends of two accountants; raises if they contradict each other."""
    if lower > upper * (1 + 1e-6) + 1e-9:
        raise ArithmeticError(
            f"a lower bound of {lower:g} and an upper bound of {upper:g} cannot both hold"
        )
    return Bound(lower=min(lower, upper), upper=upper)


def without_sampling(steps: Counts, adjacency: Adjacency) -> Counts | None:
    """The steps of which one record costs what the change costs of these; None where some are sampled.

    Where everyone takes part, a change of k slots shifts the sum by an element of k times the
    sensitivity set: that is one record under 1/k of the noise.
    """
    scaled: Counter[ComposableStep] = Counter()
    for step, count in steps.items():
        divided = step.divided(adjacency.slots) if step == step.unsampled else None
        if divided is None:
            return None
        scaled[divided] += count
    return scaled


def dominating_pairs(steps: Counts, adjacency: Adjacency) -> dict[Step, int] | None:
    """Steps that dominate the change of these; None where one has no known dominating pair."""
    dominating: Counter[Step] = Counter()
    for step, count in steps.items():
        if step.dominating_step is None:
            return None
        dominating[_group_step(step.dominating_step, adjacency)] += count
    return dict(dominating)


def dominated_pairs(steps: Counts, adjacency: Adjacency) -> dict[Step, int]:
    """Steps that the change of these dominates: their epsilon is a lower bound.

    Steps for which none is known are left out.
    """
    dominated: Counter[Step] = Counter()
    for step, count in steps.items():
        if step.dominated_step is not None:
            dominated[_group_step(step.dominated_step, adjacency)] += count
    return dict(dominated)


def chained_delta(upper: Callable[[float], float], changes: int, epsilon: float) -> float:
    """Upper bound on delta at `epsilon` of so many changes, `upper` being one's delta at an epsilon.

    The group property (Vadhan 2017, Lemma 2.2), each change having its share of epsilon.
    """
    share = epsilon / changes
    return min(1.0, upper(share) * math.exp(min(_log_chain_factor(share, changes), 700.0)))


def chained_epsilon(upper: Callable[[float], float], changes: int, delta: float) -> float:
    """Upper bound on epsilon at `delta` of so many changes, `upper` being one's epsilon at a delta."""

    def costs_more(share: float) -> bool:
        """Whether one change takes more than `share`, at the delta that is left for it then."""
        log_delta = math.log(delta) - _log_chain_factor(share, changes)
        return log_delta < _LOG_MIN_DELTA or upper(math.exp(log_delta)) > share

    high = 1e-3
    while costs_more(high):
        high *= 2
        if high > -_LOG_MIN_DELTA:
            return math.inf
    return changes * bisect(costs_more, 0.0, high, tolerance=_TOLERANCE)[1]


def _log_chain_factor(share: float, changes: int) -> float:
    """log(1 + e^share + ... + e^((changes - 1) share)), rounded up."""
    if share == 0:
        return math.log(changes) + _ROUNDING
    ratio = math.expm1(-changes * share) / math.expm1(-share)
    return (changes - 1) * share * (1 + _ROUNDING) + math.log(ratio) + _ROUNDING


def _group_step(step: PairedStep, adjacency: Adjacency) -> Step:
    if step.rate == 1:
        return step.divided(adjacency.slots)
    return SampledGroup(step, adjacency.group, adjacency.replaced)
