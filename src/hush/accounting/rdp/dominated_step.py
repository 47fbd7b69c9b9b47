"""A plain sampled Gaussian step that a step with sampled coordinates dominates."""

import math
from functools import lru_cache

from scipy.stats import binom

from hush.accounting.numerics import OUTWARD
from hush.core.parts import SensitivitySet

# Where to look for the number of coordinates that take part: a handful of its quantiles.
_QUANTILES = (1e-6, 1e-3, 0.05, 0.2, 0.5, 0.8, 0.95, 0.999, 1 - 1e-6)
_INWARD = 1 - 1e-9
# How many times more coordinates than at the cap a change is spread over.
_SPREADS = (1.0, 1e2, 1e4, 1e8)
# A record may always move fewer than it could, and SciPy counts no further.
_MAX_COORDINATES = 1e15

Blocks = tuple[tuple[SensitivitySet, float], ...]
"""Sensitivity set and noise deviation of each block of coordinates."""


@lru_cache(maxsize=1024)  # asked for at every point of a curve
def dominated_step(blocks: Blocks, rate: float, coordinate_rate: float) -> tuple[float, float]:
    """Rate and multiplier of a plain sampled Gaussian step: its epsilon is a lower bound for this one's.

    **Guarantee.** A record that moves m coordinates by c each moves their sum, under noise of deviation
    sqrt(m) times theirs, by c times a binomial number of them. That is c k at least with the probability
    that k or more take part, so the sum dominates a step at that rate and that shift; of several blocks
    likewise, each with its weight: docs/guarantees/twice-sampling.md, step 4. The best by chi-square is
    taken.

    >>> changes = SensitivitySet(p=2, norm=1.0, cap=0.1)
    >>> rate, multiplier = dominated_step(((changes, 1.5),), rate=0.06, coordinate_rate=1 / 3)
    >>> round(rate, 3), round(multiplier, 2)
    (0.06, 4.5)
    """
    movable = tuple((ball, deviation) for ball, deviation in blocks if ball.max_entry > 0)
    candidates = [(rate * coordinate_rate, deviation / ball.max_entry) for ball, deviation in movable]
    for moved in [*((block,) for block in movable), movable]:
        for spread in _SPREADS:
            candidates += _of_even_change(moved, spread, rate, coordinate_rate)
    return max(candidates, key=_chi_square)


def _of_even_change(
    blocks: Blocks, spread: float, rate: float, coordinate_rate: float
) -> list[tuple[float, float]]:
    """Steps that a change of equal coordinates in each block dominates, one for each quantile."""
    # squares of the change of a coordinate, and of all, over the deviation
    units, counts = [], []
    for ball, deviation in blocks:
        count, change = _even_change(ball, spread)
        units.append((change / deviation) ** 2 if deviation > change * 1e-150 else math.inf)
        counts.append(count)
    whole = math.sqrt(sum(unit * count for unit, count in zip(units, counts, strict=True)))
    steps = []
    for quantile in _QUANTILES:
        probability, shift = 1.0, 0.0
        for unit, count in zip(units, counts, strict=True):
            k = max(1.0, float(binom.ppf(quantile, count, coordinate_rate)))
            probability *= float(binom.sf(k - 1, count, coordinate_rate)) * _INWARD
            shift += unit * k
        if math.isfinite(shift) and shift > 0:
            steps.append((rate * probability, whole / shift / _INWARD))
    return steps


def _even_change(ball: SensitivitySet, spread: float) -> tuple[int, float]:
    """A number of coordinates that move by as much, and by how much: at the cap, or `spread` further."""
    movable = (ball.norm / ball.max_entry) ** ball.p if ball.p < math.inf else math.inf
    limit = min(movable * spread, ball.dimension or math.inf, _MAX_COORDINATES)
    count = max(1, math.floor(limit * OUTWARD))
    if count <= movable * OUTWARD:
        return count, ball.max_entry
    return count, min(ball.max_entry, ball.norm * count ** (-1 / ball.p))


def _chi_square(step: tuple[float, float]) -> float:
    """The logarithm of the chi-square divergence of a sampled Gaussian step."""
    rate, multiplier = step
    if rate == 0:
        return -math.inf
    power = max(multiplier, 700**-0.5) ** -2  # beyond, the exponential is no number
    return 2 * math.log(rate) + math.log(math.expm1(power)) if power > 0 else -math.inf
