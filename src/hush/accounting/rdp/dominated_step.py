"""A plain sampled Gaussian step that a step with sampled coordinates dominates."""

import math

import numpy as np
from scipy.stats import binom

from hush.accounting.numerics import OUTWARD
from hush.core.sensitivity import SensitivitySet

# Where to look for the number of coordinates that take part: a handful of its quantiles.
_QUANTILES = (1e-6, 1e-3, 0.05, 0.2, 0.5, 0.8, 0.95, 0.999, 1 - 1e-6)
_INWARD = 1 - 1e-9
# A record may always move fewer than it could, and SciPy counts no further.
_MAX_COORDINATES = 1e15


def dominated_step(
    ball: SensitivitySet, deviation: float, rate: float, coordinate_rate: float
) -> tuple[float, float]:
    """Rate and multiplier of a plain sampled Gaussian step: its epsilon is a lower bound for this one's.

    **Guarantee.** A record that moves m coordinates by the cap c each moves their sum, under noise of
    deviation sqrt(m) times theirs, by c times a binomial number of them. That is c k at least with the
    probability that k or more take part, so the sum dominates a step at that rate and that shift;
    docs/guarantees/twice-sampling.md, step 4. The best m and k by chi-square are taken.

    >>> changes = SensitivitySet(p=2, norm=1.0, cap=0.1)
    >>> rate, multiplier = dominated_step(changes, 1.5, rate=0.06, coordinate_rate=1 / 3)
    >>> round(rate, 3), round(multiplier, 2)
    (0.057, 5.77)
    """
    movable = (ball.norm / ball.max_entry) ** ball.p if ball.p < math.inf else math.inf
    coordinates = max(
        1, math.floor(min(movable, ball.dimension or math.inf, _MAX_COORDINATES) * OUTWARD)
    )
    candidates = [(rate * coordinate_rate, deviation / ball.max_entry)]
    for k in np.unique(np.maximum(1, binom.ppf(_QUANTILES, coordinates, coordinate_rate))):
        probability = float(binom.sf(k - 1, coordinates, coordinate_rate)) * _INWARD
        candidates.append(
            (rate * probability, deviation * math.sqrt(coordinates) / (ball.max_entry * float(k)))
        )
    return max(candidates, key=_chi_square)


def _chi_square(step: tuple[float, float]) -> float:
    """The logarithm of the chi-square divergence of a sampled Gaussian step."""
    rate, multiplier = step
    if rate == 0:
        return -math.inf
    power = max(multiplier, 700**-0.5) ** -2  # beyond, the exponential is no number
    return 2 * math.log(rate) + math.log(math.expm1(power)) if power > 0 else -math.inf
