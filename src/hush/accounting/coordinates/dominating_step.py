"""The step with a dominating pair that dominates coordinate-sampled Gaussian noise, for one record."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hush.accounting.coordinates.jump_diffusion import KILLING, best_jump, dominating_diffusion
from hush.accounting.coordinates.law import JumpDiffusionLaw

# Shifts are rounded up to powers of 2^(1/8), so that certificates are found again; below the smallest
# one they cost next to nothing, and beyond the largest one Rényi divergence is less.
_STEPS_PER_OCTAVE = 8
_MIN_SHIFT, _MAX_SHIFT = 0.004, 1.5
# Less than this in all is next to nothing, which a grid would take long to say.
_MIN_NORM = 1e-5
# The most units that one jump may have, of blocks whose noise differs.
_MAX_UNITS = 8
# Beyond this mean number of jumps their chances would underflow (exp(-745) is 0).
_MAX_JUMPS = 300.0


@dataclass(frozen=True, order=True)
class JumpDiffusionStep:
    """Poisson-subsampled jump diffusion: a step with a dominating pair, of no mechanism of its own."""

    law: JumpDiffusionLaw

    @property
    def rate(self) -> float:
        return self.law.rate

    @property
    def log_chi_square(self) -> float:
        """log-moment of order 2 before sampling of records."""
        law = self.law
        return law.variance + sum(mean * math.expm1(size * law.jump) ** 2 for size, mean in law.jumps)

    def with_representable_loss(self) -> "JumpDiffusionStep":
        return self


def dominating_step(
    rate: float, coordinate_rate: float, blocks: Sequence[tuple[float, float]]
) -> JumpDiffusionStep | None:
    """A step that dominates coordinate-sampled Gaussian noise on `blocks`; None if none is certified.

    Args:
        rate: Chance that a record takes part.
        coordinate_rate: Chance that each coordinate of it does.
        blocks: Largest change of one coordinate and l2 sensitivity of each block, in units of its noise.

    **Guarantee.** In both directions the step's hockey-stick divergence is at least the mechanism's, at
    every epsilon: docs/guarantees/twice-sampling-pld.md.
    """
    blocks = [block for block in blocks if block[0] > 0]
    if max((norm for _, norm in blocks), default=0.0) < _MIN_NORM:
        return None
    if max(shift for shift, _ in blocks) > _MAX_SHIFT:
        return None
    shifts = [_rounded_up(shift) for shift, _ in blocks]
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
    return JumpDiffusionStep(JumpDiffusionLaw(rate, variance, unit, tuple(jumps), killed))


def _rounded_up(shift: float) -> float:
    """The shift, rounded up to a power of 2^(1/8): what dominates it dominates smaller ones."""
    steps = math.ceil(_STEPS_PER_OCTAVE * math.log2(max(shift, _MIN_SHIFT)) + 1e-9)
    return float(2.0 ** (steps / _STEPS_PER_OCTAVE))
