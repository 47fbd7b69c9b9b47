"""Privacy cost of plans: Rényi divergence of one step, and epsilon and delta of a composition."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy.typing as npt

from hush.accounting import composition
from hush.accounting.mechanism import mechanism
from hush.accounting.numerics import Array
from hush.accounting.pld import accountant
from hush.accounting.steps import AllocatedGaussian, ComposableStep, Composition
from hush.clipping import Entries
from hush.core.errors import InvalidValue, Unproved
from hush.core.guarantee import DELTA, RECORD, Adjacency, Bound, Guarantee, Neighbours
from hush.core.plan import Plan, names
from hush.core.value import Range, as_floats, check_count, check_kind

_MAX_ORDERS = 10_000
_ORDER = Range(
    above=1,
    at_most=1e6,
    why="the conversion to epsilon is proved for orders above 1, and orders above the limit give no "
    "better bounds",
    example=8.0,
)
EPSILON = Range(at_least=0, why="epsilon is not negative", example=1.0)
Dimension = int | Mapping[Plan, int] | None
"""Number of parameters: for all plans, per plan, or unknown."""

_WHY_WHOLE = "the accountant composes whole steps"


def rdp(plan: Plan, orders: npt.ArrayLike, dimension: int | None = None) -> Array:
    """Rényi divergence of one step of `plan` (RDP), in nats, at each of the `orders`.

    If the sampling has a period, it is the divergence of one period.

    Args:
        plan: Sampling, clipping, noise and release of the step.
        orders: Rényi orders, each above 1.
        dimension: Number of parameters. It may reduce the privacy cost of non-Gaussian noise, and is
            required if p = beta > 2.

    **Guarantee.** An upper bound for adding and for removing one record:
    docs/guarantees/poisson-gaussian.md, coordinate-wise.md and selective.md.

    >>> import hush
    >>> plan = hush.plans.dpsgd(rate=1.0, multiplier=2.0)
    >>> [round(float(value), 6) for value in hush.rdp(plan, orders=[2, 8])]
    [0.25, 1.0]
    """
    check_kind("plan", plan, Plan)
    return composition.composed_rdp(_charged({plan: 1}, dimension, RECORD)[0], checked_orders(orders))


def checked_orders(orders: npt.ArrayLike) -> Array:
    """Validate Rényi orders and return them as an array."""
    array = as_floats(orders)
    if array.ndim != 1 or not 0 < len(array) <= _MAX_ORDERS:
        raise InvalidValue(
            f"orders={orders!r} must be a list of 1 to {_MAX_ORDERS} numbers. Pass e.g. "
            "orders=[2, 4, 8]."
        )
    for order in array:
        _ORDER.check("orders", float(order))
    return array


def epsilon(
    plan: Plan,
    steps: int,
    delta: float,
    dimension: int | None = None,
    *,
    group: int = 1,
    neighbours: Neighbours = Neighbours.ZERO_OUT,
) -> Guarantee:
    """The (epsilon, delta) guarantee of `steps` composed steps of `plan`.

    Args:
        plan: Sampling, clipping, noise and release of each step.
        steps: Number of steps.
        delta: Delta of the guarantee.
        dimension: Number of parameters, as in `hush.rdp`.
        group: Group size, for group privacy, e.g. the number of records of one person.
        neighbours: Adjacency relation: a record is added or removed (`ZERO_OUT`, `ADD_REMOVE`) or
            replaced (`REPLACE`).

    **Guarantee.** The true epsilon lies in the `Bound`: docs/guarantees/poisson-gaussian.md and
    coordinate-wise.md, and groups.md for groups and replacement. For a selective plan, the lower bound
    is for an attacker who also sees the noisy proposals and tests (selective.md).

    >>> import hush
    >>> plan = hush.plans.dpsgd(rate=0.01, multiplier=1.0)
    >>> print(hush.epsilon(plan, steps=10_000, delta=1e-5).epsilon)
    <= 6.188 (and >= 6.1876)

    >>> print(hush.epsilon(plan, steps=1000, delta=1e-5, neighbours=hush.Neighbours.REPLACE).epsilon)
    <= 2.8437 (and >= 2.8433)
    >>> print(hush.epsilon(plan, steps=1000, delta=1e-5, group=2).epsilon)
    <= 3.9794 (and >= 3.9789)
    """
    check_kind("plan", plan, Plan)
    counts = {plan: check_count("steps", steps, _WHY_WHOLE)}
    return compose(counts, delta, dimension, Adjacency(neighbours=neighbours, group=group))


def compose(
    counts: Mapping[Plan, int], delta: float, dimension: Dimension = None, adjacency: Adjacency = RECORD
) -> Guarantee:
    """The (epsilon, delta) guarantee of a composition of plans."""
    delta = DELTA["range"].check("delta", delta)
    steps, distance = _charged(counts, dimension, adjacency)
    exact = all(plan.noise.exact for plan, count in counts.items() if count)
    return Guarantee(
        epsilon=_certified(counts, composition.epsilon_bound(steps, distance, delta)),
        delta=delta,
        neighbours=adjacency.neighbours,
        unit=adjacency.unit,
        basis="proved" if all(step.basis == "proved" for step in steps) else "published",
        arithmetic="proved" if exact else "assumed",
    )


def upper_epsilon(
    counts: Mapping[Plan, int],
    delta: float,
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
    *,
    ceiling: float = math.inf,
) -> float:
    """Upper bound on epsilon of `compose`, often much faster to compute than both bounds.

    Returns infinity early if epsilon certainly exceeds `ceiling`.
    """
    delta = DELTA["range"].check("delta", delta)
    steps, distance = _charged(counts, dimension, adjacency)
    if distance.slots > 1:
        return composition.epsilon_bound(steps, distance, delta).upper
    if composition.participation_probability(steps) <= delta:
        return 0.0
    dominated = composition.dominated_steps(steps)
    if accountant.exceeds(dominated, delta, ceiling):
        return math.inf
    if composition.requires_rdp(steps):
        return composition.epsilon_upper(steps, delta, ceiling)
    return accountant.epsilon(dominated, delta).upper


def delta(
    counts: Mapping[Plan, int],
    epsilon: float,
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
) -> Bound:
    """Bounds on the delta of a composition of plans at `epsilon`."""
    return deltas(counts, [epsilon], dimension, adjacency)[0]


def deltas(
    counts: Mapping[Plan, int],
    epsilons: Sequence[float],
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
) -> list[Bound]:
    """Bounds on the delta of a composition of plans at increasing `epsilons` (privacy profile)."""
    checked = [EPSILON.check("epsilon", epsilon) for epsilon in epsilons]
    bounds = composition.delta_bounds(*_charged(counts, dimension, adjacency), checked)
    return [_certified(counts, bound) for bound in bounds]


def check_relation(plan: Plan, neighbours: Neighbours) -> None:
    """Raise `Unproved` if a plan has no proved privacy cost under an adjacency relation."""
    if neighbours is Neighbours.ADD_REMOVE and plan.sampling.counts_slots:
        raise Unproved(
            f"{names(plan)} has no proved cost under neighbours={neighbours}: the draw of a record "
            "depends on its slot or on the number of slots, which would be private. Sample with "
            "Poisson, or keep the number of slots public (ZERO_OUT)."
        )


def _certified(counts: Mapping[Plan, int], bound: Bound) -> Bound:
    """Drop the lower bound if the release is less informative than the accounted steps.

    Examples are dominated noise, noisy counts with only the argmax released (argmax.md), and a period
    that has not ended.
    """
    if any(
        isinstance(plan.clipping, Entries)
        or plan.noise.dominating_noise(1.0) is not None
        or count % plan.sampling.period
        for plan, count in counts.items()
        if count
    ):
        return Bound(lower=0.0, upper=bound.upper)
    return bound


def charged_steps(plan: Plan, steps: int) -> int:
    """Number of times that a run of `steps` steps of `plan` is charged: once per period."""
    return -(-check_count("steps", steps, _WHY_WHOLE) // plan.sampling.period)


def _charged(
    counts: Mapping[Plan, int], dimension: Dimension, adjacency: Adjacency
) -> tuple[Mapping[ComposableStep, int], Adjacency]:
    """Number of executions of each step, and the adjacency.

    With full batches, a change of k slots costs as much as a change of one slot with 1/k of the noise.
    """
    steps: Counter[ComposableStep] = Counter()
    check_kind("adjacency", adjacency, Adjacency)
    for plan, count in counts.items():
        size = dimension.get(plan) if isinstance(dimension, Mapping) else dimension
        whole, repeats = mechanism(plan, size), charged_steps(plan, count)
        check_relation(plan, adjacency.neighbours)
        # records of a group may take part in different steps of a period: only the group property holds
        within = adjacency.group == 1 or plan.sampling.period == 1
        within = within or isinstance(whole, AllocatedGaussian)
        if adjacency.slots > 1 and not (whole.charged_for_groups and within):
            raise Unproved(
                f"{names(plan)} has no proved cost for group={adjacency.group}, "
                f"neighbours={adjacency.neighbours}: no bound is proved for {adjacency.slots} slots "
                "that change together. Use Poisson sampling, Gaussian noise and release=Always(), or "
                "pass group=1 and another adjacency relation."
            )
        for step, multiplicity in whole.components if isinstance(whole, Composition) else [(whole, 1)]:
            steps[step] += check_count("steps", multiplicity * repeats, _WHY_WHOLE)
    steps = Counter({step: count for step, count in steps.items() if count})
    scaled: Counter[ComposableStep] = Counter()
    for step, count in steps.items():
        divided = step.divided(adjacency.slots) if step == step.unsampled else None
        if adjacency.slots == 1 or divided is None:
            return steps, adjacency
        scaled[divided] += count
    return scaled, RECORD
