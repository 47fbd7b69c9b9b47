"""A discrete dominating pair of one Poisson-subsampled Gaussian step (connect-the-dots).

Between two cuts a convex function of the likelihood ratio lies below its chord, and the chord's
expectation needs only the two laws' masses between the cuts. So a sum over the cuts bounds the
expectation of every convex function from above, whatever its kinks:
docs/guarantees/selective.md, step 4.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, ndtri

from hush.accounting.numerics import Array, log1mexp, log_mixture_ratio
from hush.accounting.steps import SampledGaussian

# Cuts around the centre of the law (where a sampled step decides), around the order (where large
# orders look), and over everything in between out to _FAR deviations.
_CENTRE, _PEAK, _BETWEEN = 1200, 600, 600
_FAR = 38.0
# Cuts no closer than this many deviations: masses of closer ones are mostly rounding.
_MIN_GAP = 1e-4
# Relative rounding of the ratio of two masses, see docs/guarantees/selective.md, step 4.
_ROUNDING = 1e-10


@dataclass(frozen=True, eq=False)
class DominatingPair:
    """Likelihood ratios (with the record / without it) and their weights without it, in logs."""

    log_ratio: Array
    log_weight: Array
    low: float
    high: float
    """The outcomes between which the pair dominates the step; the tails are the caller's to bound."""


@lru_cache(maxsize=256)
def dominating_pair(step: SampledGaussian, order: float) -> DominatingPair:
    """The pair for convex functions that grow like the power `order` of the ratio, or of its inverse."""
    cuts = _cuts(step.multiplier, order)
    log_shift_ratio = (cuts - 0.5) / step.multiplier / step.multiplier
    without = _log_masses(cuts / step.multiplier)
    shifted = _log_masses((cuts - 1) / step.multiplier)
    # With masses n, n' of N(0) and N(1) in a cell and growths e0, e1 at its ends, the chord gives its
    # upper end the weight (n' - e0 n) / (e1 - e0) and its lower end the rest of n.
    gap = np.diff(log_shift_ratio)
    log_mean = np.clip(shifted - without - log_shift_ratio[:-1], 0.0, gap)
    share = np.exp(log_mean - gap) * np.expm1(-log_mean) / np.expm1(-gap)
    rounding = np.minimum(1.0, _ROUNDING / gap)
    weight = np.full(len(cuts), -np.inf)
    weight[:-1] = without + np.log(np.minimum(1.0, 1 - share + rounding))
    weight[1:] = np.logaddexp(weight[1:], without + np.log(np.minimum(1.0, share + rounding)))
    return DominatingPair(
        log_mixture_ratio(step.rate, log_shift_ratio), weight, float(cuts[0]), float(cuts[-1])
    )


def log_beyond(step: SampledGaussian, order: float, high: float) -> float:
    """An upper bound on log E_Q[ratio^order; outcome > high], Q the law without the record."""
    variance = step.multiplier * step.multiplier
    log_shift_ratio = (high - 0.5) / variance
    # beyond `high` the ratio is at most exp(growth) (q + (1 - q) exp(-growth there))
    rest = math.log(step.rate + (1 - step.rate) * math.exp(-min(max(log_shift_ratio, 0.0), 700.0)))
    moment = order * (order - 1) / 2 / variance
    return order * rest + moment + float(log_ndtr((order - high) / step.multiplier))


def log_below(step: SampledGaussian, order: float, low: float) -> float:
    """An upper bound on log E_Q[ratio^(1 - order); outcome < low], Q the law without the record."""
    variance = step.multiplier * step.multiplier
    moment = order * (order - 1) / 2 / variance
    shifted = float(log_ndtr((low + order - 1) / step.multiplier))
    tilted = (1 - order) * math.log(step.rate) + moment + shifted
    if step.rate == 1:
        return tilted
    by_smallest_ratio = (1 - order) * math.log1p(-step.rate) + float(log_ndtr(low / step.multiplier))
    return min(tilted, by_smallest_ratio)


def hockey_stick(step: SampledGaussian, threshold: float) -> float:
    """An upper bound on the hockey-stick divergence E_Q[(ratio - threshold)+], threshold >= 1 - rate."""
    if step.rate == 1 and threshold <= 0:
        return 1.0 - threshold
    excess = (threshold - (1 - step.rate)) / step.rate
    if excess <= 0:
        return 1.0 - threshold
    cut = step.multiplier**2 * math.log(excess) + 0.5
    with_record = math.exp(float(log_ndtr((1 - cut) / step.multiplier)))
    without = math.exp(float(log_ndtr(-cut / step.multiplier)))
    gain, loss = step.rate * (with_record - without), (threshold - 1) * without
    return max(0.0, gain - loss) + 1e-14 * (step.rate * with_record + abs(loss))


def _cuts(deviation: float, order: float) -> Array:
    """Increasing outcomes, dense where the integrand of either direction may be large."""
    centre = deviation * math.sqrt(3) * ndtri((np.arange(_CENTRE) + 0.5) / _CENTRE)
    peak = deviation * math.sqrt(3) * ndtri((np.arange(_PEAK) + 0.5) / _PEAK)
    low, high = 1 - order - _FAR * deviation, order + _FAR * deviation
    parts = [centre, order + peak, 1 - order + peak, np.linspace(low, high, _BETWEEN)]
    cuts = np.unique(np.concatenate(parts))
    cells = np.floor((cuts - low) / (_MIN_GAP * deviation))
    thinned: Array = cuts[np.append(True, np.diff(cells) > 1)]
    return thinned


def _log_masses(cuts: Array) -> Array:
    """The logs of the standard normal masses between increasing cuts, from the lighter tail."""
    lower, upper = log_ndtr(cuts), log_ndtr(-cuts)
    left = lower[1:] + log1mexp(lower[:-1] - lower[1:])
    right = upper[:-1] + log1mexp(upper[1:] - upper[:-1])
    masses: Array = np.where(cuts[1:] + cuts[:-1] > 0, right, left)
    return masses
