"""Steps with a dominating pair that bound coordinate-sampled Gaussian noise from either side."""

import math
from collections.abc import Sequence
from functools import lru_cache

from hush.accounting.numerics import OUTWARD
from hush.accounting.pld.jump_diffusion import KILLING, JumpDiffusionLaw, best_jump, dominating_diffusion
from hush.core.parts import SensitivitySet

# Shifts are rounded up to powers of 2^(1/8), to reuse certificates. Below the smallest one the cost is
# negligible, and beyond the largest one Rényi divergence is smaller.
_STEPS_PER_OCTAVE = 8
_MIN_SHIFT, _MAX_SHIFT = 0.004, 1.5
# A smaller total is negligible, and its grid would be slow.
_MIN_NORM = 1e-5
# Largest number of units of one jump, if the blocks have different noise.
_MAX_UNITS = 8
# Beyond this mean number of jumps their chances would underflow (exp(-745) is 0).
_MAX_JUMPS = 300.0


def dominating_jump_diffusion(
    rate: float, coordinate_rate: float, blocks: Sequence[tuple[float, float]]
) -> JumpDiffusionLaw | None:
    """A step that dominates coordinate-sampled Gaussian noise on `blocks`; None if none is certified.

    `blocks` are the largest change of one coordinate and the l2 sensitivity, in units of the noise.

    **Guarantee.** In both directions the step's hockey-stick divergence is at least the mechanism's, at
    every epsilon: docs/guarantees/twice-sampling-pld.md.
    """
    blocks = [block for block in blocks if block[0] > 0]
    if max((norm for _, norm in blocks), default=0.0) < _MIN_NORM:
        return None
    if max(shift for shift, _ in blocks) > _MAX_SHIFT:
        return None
    # a step that dominates a shift also dominates smaller ones
    octaves = [math.log2(max(shift, _MIN_SHIFT)) for shift, _ in blocks]
    shifts = [
        float(2.0 ** (math.ceil(_STEPS_PER_OCTAVE * x + 1e-9) / _STEPS_PER_OCTAVE)) for x in octaves
    ]
    wanted = [best_jump(coordinate_rate, shift) for shift in shifts]
    unit = max(min(wanted), max(wanted) / _MAX_UNITS)
    variance, jumps = 0.0, []
    for shift, jump, (_, norm) in zip(shifts, wanted, blocks, strict=True):
        units = max(1, round(jump / unit))
        diffusion = dominating_diffusion(coordinate_rate, shift, units * unit)
        if diffusion is None:
            return None
        variance += norm**2 * diffusion.variance
        jumps.append((units, norm**2 * diffusion.intensity))
    if sum(mean * math.exp(units * unit) for units, mean in jumps) > _MAX_JUMPS:
        return None
    killed = KILLING * sum(norm**2 for _, norm in blocks)
    return JumpDiffusionLaw(rate, variance, unit, tuple(jumps), killed)


# Quantiles of the number of coordinates that take part, one candidate each.
_QUANTILES = (1e-6, 1e-3, 0.05, 0.2, 0.5, 0.8, 0.95, 0.999, 1 - 1e-6)
_INWARD = 1 - 1e-9
# Numbers of coordinates of a spread change, relative to the number at the cap.
_SPREADS = (1.0, 1e2, 1e4, 1e8)
# A record may always move fewer than it could, and SciPy counts up to here.
_MAX_COORDINATES = 1e15

NormalBlocks = tuple[tuple[SensitivitySet, float], ...]
"""Sensitivity set and noise deviation of each block of coordinates."""


@lru_cache(maxsize=1024)  # called at every point of a curve
def dominated_gaussian(blocks: NormalBlocks, rate: float, coordinate_rate: float) -> tuple[float, float]:
    """Rate and multiplier of a plain sampled Gaussian step: its epsilon is a lower bound for this one's.

    **Guarantee.** docs/guarantees/twice-sampling.md, step 4: a sum of m coordinates that move by c each
    dominates a step with the shift c k, at the probability that k or more take part. The result is the
    best of some m and k by chi-square.
    """
    movable = tuple((ball, deviation) for ball, deviation in blocks if ball.max_entry > 0)
    candidates = [(rate * coordinate_rate, deviation / ball.max_entry) for ball, deviation in movable]
    for moved in [*((block,) for block in movable), movable]:
        for spread in _SPREADS:
            candidates += _of_even_change(moved, spread, rate, coordinate_rate)
    return max(candidates, key=_chi_square)


def _of_even_change(
    blocks: NormalBlocks, spread: float, rate: float, coordinate_rate: float
) -> list[tuple[float, float]]:
    """Steps that a change of equal coordinates in each block dominates, one for each quantile."""
    from scipy.stats import binom  # importing it takes long

    units, counts = [], []  # squared change of a coordinate over the deviation, number of coordinates
    for ball, deviation in blocks:
        movable = (ball.norm / ball.max_entry) ** ball.p if ball.p < math.inf else math.inf
        limit = min(movable * spread, ball.dimension or math.inf, _MAX_COORDINATES)
        count, change = max(1, math.floor(limit * OUTWARD)), ball.max_entry
        if count > movable * OUTWARD:
            change = min(ball.max_entry, ball.norm * count ** (-1 / ball.p))
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


def _chi_square(step: tuple[float, float]) -> float:
    """The logarithm of the chi-square divergence of a sampled Gaussian step."""
    rate, multiplier = step
    if rate == 0:
        return -math.inf
    power = max(multiplier, 700**-0.5) ** -2  # avoids overflow of the exponential
    return 2 * math.log(rate) + math.log(math.expm1(power)) if power > 0 else -math.inf
