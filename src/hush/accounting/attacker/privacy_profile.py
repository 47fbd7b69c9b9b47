"""The privacy profile: delta as a function of epsilon, certified from both sides, at many epsilons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hush.accounting import groups
from hush.accounting import renyi_composition as renyi
from hush.accounting.epsilon import EPSILON, Dimension, certified, charged, compose
from hush.core.guarantee import RECORD, Adjacency, Bound
from hush.core.plan import Plan

# The profile ends at this delta, and at this epsilon where that comes first.
_MIN_DELTA, _MAX_EPSILON = 1e-12, 700.0
_POINTS = 129


@dataclass(frozen=True, kw_only=True)
class PrivacyProfile:
    """Bounds on delta at increasing epsilons; read the other way, on epsilon at a delta.

    Args:
        epsilons: From 0 to where delta is next to nothing.
        lower: No smaller delta holds.
        upper: This delta holds.
    """

    epsilons: tuple[float, ...]
    lower: tuple[float, ...]
    upper: tuple[float, ...]


def privacy_profile(
    counts: Mapping[Plan, int], dimension: Dimension = None, adjacency: Adjacency = RECORD
) -> PrivacyProfile:
    """The privacy profile of a composition of plans, from epsilon 0 to the one at delta 1e-12.

    Args:
        counts: Number of steps of each plan.
        dimension: Number of parameters, where the charge depends on it.
        adjacency: What neighbours differ in.

    Returns:
        Epsilons and, at each, both ends of delta.

    **Guarantee.** As for `hush.epsilon`: the true delta lies between the two.
    """
    end = compose(counts, _MIN_DELTA, dimension, adjacency).epsilon.upper
    epsilons = np.linspace(0.0, min(end, _MAX_EPSILON), _POINTS if end > 0 else 1).tolist()
    bounds = delta_profile(counts, epsilons, dimension, adjacency)
    return PrivacyProfile(
        epsilons=tuple(epsilons),
        lower=tuple(bound.lower for bound in bounds),
        upper=tuple(bound.upper for bound in bounds),
    )


def delta_profile(
    counts: Mapping[Plan, int],
    epsilons: Sequence[float],
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
) -> list[Bound]:
    """Bounds on the delta of a composition of plans at each epsilon: much cheaper than one by one.

    Args:
        counts: Number of steps of each plan.
        epsilons: In increasing order.
        dimension: Number of parameters, where the charge depends on it.
        adjacency: What neighbours differ in.

    Returns:
        Lower and upper bounds on delta, one for each epsilon.
    """
    checked = [EPSILON.check("epsilon", epsilon) for epsilon in epsilons]
    bounds = groups.delta_bounds(*charged(counts, dimension, adjacency), checked)
    return [certified(counts, bound) for bound in bounds]


def upper_deltas(
    counts: Mapping[Plan, int],
    epsilons: Sequence[float],
    dimension: Dimension = None,
    adjacency: Adjacency = RECORD,
) -> list[float]:
    """The upper ends of `delta_profile`: all that a search needs, and sometimes much cheaper.

    Args:
        counts: Number of steps of each plan.
        epsilons: In increasing order.
        dimension: Number of parameters, where the charge depends on it.
        adjacency: What neighbours differ in.

    Returns:
        Upper bounds on delta, one for each epsilon.
    """
    steps, distance = charged(counts, dimension, adjacency)
    if distance.slots == 1 and renyi.requires_rdp(steps):
        return renyi.delta_uppers(steps, epsilons)
    return [bound.upper for bound in groups.delta_bounds(steps, distance, epsilons)]
