"""Bounds on what steps cost together that need no grid: rough, but true of any amount of noise."""

import math
from collections.abc import Mapping

import numpy as np

from hush.accounting.mechanism import LARGEST_LOSS, SampledGaussian
from hush.accounting.pld.privacy_loss import Direction, Step, cell_masses, loss_range, reach
from hush.accounting.rdp import gaussian

# Each bound is a few roundings away from what is written here; this outweighs them.
OUTWARD = 1 + 1e-12
# How far above epsilon, and above the logarithm of the number of steps, a loss is called large.
_ABOVE = np.array([0.5, 2.0, 8.0, 32.0])


def total_variation(counts: Mapping[Step, int]) -> float:
    """No less than the total variation distance, which is delta at epsilon 0.

    Steps coupled one by one agree in all with at least the product of their chances to agree.
    """
    log_agree = 0.0
    for step, count in counts.items():
        chance = min(step.rate * step.law.distance, 1 - 2.0**-53)
        log_agree += count * math.log1p(-chance)
    return min(1.0, OUTWARD * -math.expm1(log_agree))


def max_loss(counts: Mapping[Step, int], direction: Direction) -> float:
    """No less than any loss; infinite if there is no such number."""
    return OUTWARD * sum(
        count * loss_range(step, direction)[1] for step, count in counts.items() if count
    )


def least_delta(counts: Mapping[Step, int], epsilon: float) -> float:
    """No more than delta at `epsilon`; 0 if nothing better is known.

    Of the event that any step's privacy loss exceeds a cut, the first law's probability less
    exp(epsilon) times the second's, for some cuts. The second's is at most the sum over the steps.
    """
    if not epsilon < LARGEST_LOSS:
        return 0.0
    cuts = epsilon + math.log(sum(counts.values())) + _ABOVE
    log_none, second = np.zeros(len(cuts)), np.zeros(len(cuts))
    for step, count in counts.items():
        cut = cell_masses(step, Direction.REMOVE, cuts)
        # masses above each cut: sums of positive terms, each with its bounded rounding
        first = np.cumsum(cut.first[::-1])[::-1][1:] * (1 - 2 * cut.error.max())
        log_none += count * np.log1p(-np.clip(first, 0.0, 1 - 2.0**-53))
        second += count * np.cumsum(cut.second[::-1])[::-1][1:] * (1 + 2 * cut.error.max())
    with np.errstate(divide="ignore", over="ignore"):
        gap = -np.expm1(log_none) / OUTWARD - np.exp(epsilon + np.log(second)) * OUTWARD
    return max(0.0, float(gap.max()))


def epsilon(counts: Mapping[Step, int], delta: float) -> float:
    """No less than epsilon at `delta`; infinite if nothing better is known.

    Gaussian steps by Rényi divergence. The others by a loss that none of them exceeds, but with
    probability delta. Both together at half of delta each.
    """
    normal = {step: count for step, count in counts.items() if isinstance(step, SampledGaussian)}
    others = {step: count for step, count in counts.items() if step not in normal}
    if not others:
        return gaussian.epsilon(normal, delta)
    share = delta / 2 if normal else delta
    total = 0.0
    for direction in Direction:
        if total < math.inf:
            total = max(total, _nearly_most(others, direction, share))
    if normal:
        total += gaussian.epsilon(normal, share)
    return min(OUTWARD * total, max(max_loss(counts, direction) for direction in Direction))


def _nearly_most(counts: Mapping[Step, int], direction: Direction, delta: float) -> float:
    """A loss that all steps together exceed with probability at most `delta`."""
    tail = delta / sum(counts.values())
    total = 0.0
    for step, count in counts.items():
        ceiling = reach(step, direction, tail)[1]
        if math.isinf(ceiling):
            return math.inf
        ceiling += 1e-12 * (1 + abs(ceiling))
        beyond = cell_masses(step, direction, np.array([ceiling]))
        if not beyond.first[-1] * (1 + beyond.error[-1]) <= tail:
            return math.inf
        total += count * ceiling
    return max(0.0, total)
