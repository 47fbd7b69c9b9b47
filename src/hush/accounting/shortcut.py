"""Bounds on what steps cost together that need no grid: rough, but true of any amount of noise."""

import math
from collections.abc import Mapping

import numpy as np

from hush.accounting import rdp
from hush.accounting.loss import Direction, Step, cells, ends, reach
from hush.accounting.mechanism import SampledGaussian

# Each bound is a few roundings away from what is written here; this outweighs them.
OUTWARD = 1 + 1e-12


def distance(counts: Mapping[Step, int]) -> float:
    """No less than the total variation distance, which is delta at epsilon 0.

    Steps coupled one by one agree in all with at least the product of their chances to agree.
    """
    log_agree = 0.0
    for step, count in counts.items():
        chance = min(step.rate * step.law.distance, 1 - 2.0**-53)
        log_agree += count * math.log1p(-chance)
    return min(1.0, OUTWARD * -math.expm1(log_agree))


def most(counts: Mapping[Step, int], direction: Direction) -> float:
    """No less than any loss; infinite if there is no such number."""
    return OUTWARD * sum(count * ends(step, direction)[1] for step, count in counts.items() if count)


def epsilon(counts: Mapping[Step, int], delta: float) -> float:
    """No less than epsilon at `delta`; infinite if nothing better is known.

    Gaussian steps by Rényi divergence. The others by a loss that none of them exceeds, but with
    probability delta. Both together at half of delta each.
    """
    normal = {step: count for step, count in counts.items() if isinstance(step, SampledGaussian)}
    others = {step: count for step, count in counts.items() if step not in normal}
    if not others:
        return rdp.epsilon(normal, delta)
    share = delta / 2 if normal else delta
    total = 0.0
    for direction in Direction:
        if total < math.inf:
            total = max(total, _nearly_most(others, direction, share))
    if normal:
        total += rdp.epsilon(normal, share)
    return min(OUTWARD * total, max(most(counts, direction) for direction in Direction))


def _nearly_most(counts: Mapping[Step, int], direction: Direction, delta: float) -> float:
    """A loss that all steps together exceed with probability at most `delta`."""
    tail = delta / sum(counts.values())
    total = 0.0
    for step, count in counts.items():
        ceiling = reach(step, direction, tail)[1]
        if math.isinf(ceiling):
            return math.inf
        ceiling += 1e-12 * (1 + abs(ceiling))
        beyond = cells(step, direction, np.array([ceiling]))
        if not beyond.first[-1] * (1 + beyond.error[-1]) <= tail:
            return math.inf
        total += count * ceiling
    return max(0.0, total)
