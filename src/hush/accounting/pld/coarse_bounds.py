"""Bounds on a composition that need no grid: loose, but valid for any amount of noise."""

import math
from collections.abc import Mapping

import numpy as np

from hush.accounting.numerics import OUTWARD, UNIT
from hush.accounting.pld.privacy_loss import (
    Direction,
    Step,
    cell_masses,
    loss_quantiles,
    loss_range,
    loss_rounding,
)
from hush.accounting.pld.privacy_loss import total_variation as step_variation
from hush.accounting.rdp import gaussian
from hush.accounting.steps import MAX_LOSS, SampledGaussian

# How far a large loss of one step is above epsilon plus the logarithm of the number of steps.
_MARGINS = np.array([0.5, 2.0, 8.0, 32.0])


def total_variation(counts: Mapping[Step, int]) -> float:
    """Upper bound on the total variation distance, which is delta at epsilon 0.

    Steps coupled one by one all agree with at least the product of their probabilities to agree.
    """
    log_agree = 0.0
    for step, count in counts.items():
        distance = min(step_variation(step), 1 - 2.0**-53)
        log_agree += count * math.log1p(-distance)
    return min(1.0, OUTWARD * -math.expm1(log_agree))


def max_loss(counts: Mapping[Step, int], direction: Direction) -> float:
    """Upper bound on the composed privacy loss (pure epsilon); infinite if there is none."""
    return OUTWARD * sum(
        count * loss_range(step, direction)[1] for step, count in counts.items() if count
    )


def delta_lower(counts: Mapping[Step, int], epsilon: float) -> float:
    """Lower bound on delta at `epsilon`; 0 if nothing better is known.

    The event that some step's privacy loss exceeds a cut: its probability under the first law less
    exp(epsilon) times that under the second, for some cuts. A union bound holds for the second.
    """
    if not epsilon < MAX_LOSS:
        return 0.0
    cuts = epsilon + math.log(sum(counts.values())) + _MARGINS
    log_none, second = np.zeros(len(cuts)), np.zeros(len(cuts))
    for step, count in counts.items():
        cut = cell_masses(step, Direction.REMOVE, cuts)
        # survival at each cut: sums of positive terms, each with its bounded rounding
        first = np.cumsum(cut.first[::-1])[::-1][1:] * (1 - 2 * cut.error.max())
        log_none += count * np.log1p(-np.clip(first, 0.0, 1 - 2.0**-53))
        second += count * np.cumsum(cut.second[::-1])[::-1][1:] * (1 + 2 * cut.error.max())
    with np.errstate(divide="ignore", over="ignore"):
        gap = -np.expm1(log_none) / OUTWARD - np.exp(epsilon + np.log(second)) * OUTWARD
    return max(0.0, float(gap.max()))


def epsilon_upper(counts: Mapping[Step, int], delta: float) -> float:
    """Upper bound on epsilon at `delta`; infinite if nothing better is known.

    Gaussian steps by Rényi divergence; the others by quantiles of their losses, which are exceeded
    with probability delta. Where there are both, each has half of delta.
    """
    gaussian_steps = {step: count for step, count in counts.items() if isinstance(step, SampledGaussian)}
    non_gaussian = {step: count for step, count in counts.items() if step not in gaussian_steps}
    if not non_gaussian:
        return gaussian.epsilon(gaussian_steps, delta)
    share = delta / 2 if gaussian_steps else delta
    total = 0.0
    for direction in Direction:
        if total < math.inf:
            total = max(total, _loss_quantile(non_gaussian, direction, share))
    if gaussian_steps:
        total += gaussian.epsilon(gaussian_steps, share)
    return min(OUTWARD * total, max(max_loss(counts, direction) for direction in Direction))


def _loss_quantile(counts: Mapping[Step, int], direction: Direction, delta: float) -> float:
    """A composed loss that is exceeded with probability at most `delta`."""
    tail = delta / sum(counts.values())
    total = 0.0
    for step, count in counts.items():
        ceiling = loss_quantiles(step, direction, tail)[1]
        if math.isinf(ceiling):
            return math.inf
        ceiling += 1e-12 * (1 + abs(ceiling))
        beyond = cell_masses(step, direction, np.array([ceiling]))
        if not beyond.first[-1] * (1 + beyond.error[-1]) <= tail:
            return math.inf
        # a loss at this cut may be off by more than the usual units, where laws are mixtures
        total += count * (ceiling + (loss_rounding(step) - 32 * UNIT) * (1 + abs(ceiling)))
    return max(0.0, total)
