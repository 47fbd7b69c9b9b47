"""Jump diffusions that dominate all coordinate-sampled shifts up to a given size.

L_s is the likelihood ratio of a coordinate that changes by sqrt(s) with probability p, and N_s is the
family of a jump diffusion (docs/guarantees/twice-sampling-pld.md). If L_s <= N_s in convex order for all
s up to u^2, then every product of ratios L_s is dominated by N at the sum of their s.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import erf, ndtr

from hush.accounting.numerics import OUTWARD, UNIT, Array, bisect, log_mixture_ratio_absolute
from hush.accounting.pld.laws import GaussianLaw
from hush.accounting.pld.privacy_loss import (
    Direction,
    Step,
    mixture_quantiles,
    noise_masses,
    unsampled_ratio,
)

KILLING = 1e-13
"""Rate of infinite losses, which accounts for the tails that the certificate does not cover."""

# Ratio of neighbouring sizes s that are certified; N is evaluated at s / RATIO.
_RATIO = 1.005
# Factor on the variance RATIO * p^2: slack for strikes between evaluated strikes.
_SPARE = 1.001
# Strikes are the values of L_s at these z. A lemma covers strikes below the first one.
_STRIKES: Array = np.linspace(0.0, 8.8, 221)
_MAX_INTENSITY = 1e4
# The lower bound on N's call prices omits numbers of jumps with a smaller probability.
_NEGLIGIBLE = 1e-17
# Number of sizes per chunk (limits memory), and number of sizes in the search.
_CHUNK, _SEARCHED = 128, 32
# Relative rounding error of survival probabilities: 4 (5 + 2 z^2) units for ndtr and its argument.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class JumpDiffusion:
    """Variance v^2 and jump intensity lambda per unit of squared shift, and jump size x."""

    variance: float
    jump: float
    intensity: float


def best_jump(coordinate_rate: float, shift: float) -> float:
    """Jump size of a nearly optimal dominating diffusion. Every size is valid.

    For small shifts u, the optimal size is about 2.26 p u. The other terms are empirical.
    """
    units = 2.2 + min(1.5 / coordinate_rate, 40.0) * shift**2
    return math.log1p(units * coordinate_rate * shift)


@lru_cache(maxsize=256)
def dominating_diffusion(coordinate_rate: float, shift: float, jump: float) -> JumpDiffusion | None:
    """Diffusion with this jump size that dominates all shifts up to `shift`, or None.

    Its intensity is nearly minimal, and `dominates` certifies it.
    """
    variance = coordinate_rate**2 * _RATIO * _SPARE
    sizes = shift**2 * np.geomspace(1.0, 1e-4, _SEARCHED)[:, None]

    def too_rare(intensity: float) -> bool:
        return not _ordered(JumpDiffusion(variance, jump, intensity), coordinate_rate, sizes)

    high = 1.0
    while too_rare(high):
        high *= 4
        if high > _MAX_INTENSITY:
            return None
    _, high = bisect(too_rare, 0.0, high, tolerance=1e-3 * min(1.0, high))
    for slack in (1.001, 1.01, 1.1):
        diffusion = JumpDiffusion(variance, jump, slack * high)
        if dominates(diffusion, coordinate_rate, shift):
            return diffusion
    return None


def dominates(diffusion: JumpDiffusion, coordinate_rate: float, shift: float) -> bool:
    """Whether L_s <= N_s in convex order is certified for every s up to `shift`^2.

    **Guarantee.** The result is true only if the order is valid: docs/guarantees/twice-sampling-pld.md,
    steps 4 to 6.
    """
    # largest size for which the order is valid for any jumps: step 6
    excess = 8 * (math.sqrt(diffusion.variance) - coordinate_rate)
    if excess <= 0 or diffusion.variance > coordinate_rate:
        return False
    lowest = min((excess / 4) ** 2, shift**2, 0.25)
    while (root := math.sqrt(lowest)) > 0:
        if float(ndtr(root / 2 - excess / root)) <= 0.49 * KILLING * lowest:
            break
        lowest /= 1.2
    else:
        return False
    count = math.ceil(math.log(shift**2 / lowest) / math.log(_RATIO) + 1e-9)
    sizes = shift**2 * _RATIO ** -np.arange(count, dtype=float)
    chunks = (sizes[start : start + _CHUNK, None] for start in range(0, count, _CHUNK))
    return all(_ordered(diffusion, coordinate_rate, chunk) for chunk in chunks)


def _ordered(diffusion: JumpDiffusion, rate: float, sizes: Array) -> bool:
    """Whether L_s <= N_(s / RATIO) in convex order, for each of the decreasing `sizes` s (a column).

    Compares call prices, as in steps 4 (strikes below the first) and 5 of the proof.
    """
    root, times = np.sqrt(sizes), sizes / _RATIO
    normal, sampled = erf(np.sqrt(diffusion.variance * times / 2)), rate * erf(root / math.sqrt(2))
    ratio = np.exp(root * _STRIKES - sizes / 2)
    # in logarithms, because strikes near 1 would be indistinguishable in double precision
    log_strikes = np.log1p(rate * np.expm1(root * _STRIKES - sizes / 2))
    strikes, tail = np.exp(log_strikes), ndtr(root - _STRIKES)
    calls = rate * (tail - ratio * ndtr(-_STRIKES) + 2 * _ROUNDING * tail)
    first, second = _survival(diffusion, times, log_strikes)
    infinite = -np.expm1(-KILLING * times)
    first += infinite
    # N's call price is convex, so it is above its tangents first - K second
    sure = (1 - 2 * _ROUNDING) * first
    here = sure - strikes * second - calls
    at_next = sure[:, :-1] - strikes[:, 1:] * second[:, :-1] - calls[:, 1:]
    at_last = sure[:, 1:] - strikes[:, :-1] * second[:, 1:] - calls[:, :-1]
    # the chord of L's call price is below the larger of the two tangents
    ordered = (here[:, :-1] >= 0) & (here[:, 1:] >= 0)
    ordered &= (at_next >= 0) | (at_last >= 0) | (at_next * at_last <= here[:, :-1] * here[:, 1:])
    paid = calls <= infinite
    ordered |= paid[:, :-1]
    return bool((normal > OUTWARD * sampled).all() and ordered.all() and paid[:, -1].all())


def _survival(diffusion: JumpDiffusion, times: Array, log_strikes: Array) -> tuple[Array, Array]:
    """Probabilities that the finite part of N exceeds the strikes, with and without the record."""
    deviation, mean = np.sqrt(diffusion.variance * times), diffusion.intensity * times
    drift = -mean * math.expm1(diffusion.jump) - KILLING * times
    place = (drift - log_strikes) / deviation - deviation / 2
    first, second = np.zeros_like(log_strikes), np.zeros_like(log_strikes)
    weight, jumps = np.exp(-mean), 0
    while float((weight * np.exp(jumps * diffusion.jump)).max()) > _NEGLIGIBLE:
        jumped = place + jumps * diffusion.jump / deviation
        second += weight * ndtr(jumped)
        first += weight * np.exp(jumps * diffusion.jump + drift) * ndtr(jumped + deviation)
        jumps += 1
        weight = weight * mean / jumps
    return first, second


_NORMAL = GaussianLaw(1.0)
# Under each distribution, numbers of jumps with a smaller total probability count as infinite losses.
_BEYOND = 1e-25
# Number of cells of the quadrature estimate.
_QUADRATURE = 1201


@dataclass(frozen=True)
class JumpDiffusionLaw(Step):
    """Likelihood ratio exp(W) of a jump diffusion, for a record with sampling rate `rate`."""

    rate: float
    variance: float
    """Variance of the normal part of W."""
    jump: float
    """Unit of the jumps."""
    jumps: tuple[tuple[int, float], ...]
    """Jump sizes in units of `jump`, and the mean number of jumps of each size without the record."""
    killed: float
    """Negative log of the probability that the loss is finite, with the record."""

    @property
    def log_chi_square(self) -> float:
        """Log-moment of order 2, without sampling of records."""
        return self.variance + sum(mean * math.expm1(size * self.jump) ** 2 for size, mean in self.jumps)

    @property
    def total_variation(self) -> float:
        below = self._masses(np.zeros(1))
        # both are sums of positive terms, so their difference has a small absolute error
        distance = below[0][1] - below[1][1] - math.expm1(-self.killed)
        return min(1.0, self.rate * (float(distance) + 1e-12) * OUTWARD)

    @property
    def loss_rounding(self) -> float:
        # rounding errors of component means and of the subsampled ratio
        return 32 * UNIT * (2 + self.variance + abs(self._drift) + self.jump * len(_components(self)[0]))

    @property
    def ratio_range(self) -> tuple[float, float]:
        return (math.log1p(-self.rate) if self.rate < 1 else -math.inf), math.inf

    @property
    def centre(self) -> float:  # type: ignore[override]
        places, _, without = _components(self)
        return float(places[int(np.argmax(without))])

    def log_ratio(self, outcomes: Array) -> Array:
        return log_mixture_ratio_absolute(self.rate, outcomes)

    def loss_quadrature(self, direction: Direction, tail: float) -> tuple[Array, Array]:
        cuts = np.linspace(*self.outcome_quantiles(direction, tail), _QUADRATURE)
        diffused, without = (law[1:-1] for law in self._masses(cuts))
        if direction is Direction.REMOVE:
            without = self.rate * diffused + (1 - self.rate) * without
        losses = self.privacy_loss(direction, (cuts[1:] + cuts[:-1]) / 2)
        return losses, np.log(np.maximum(without, 1e-300))

    def outcome_quantiles(self, direction: Direction, tail: float) -> tuple[float, float]:
        places, diffused, without = _components(self)
        removed = direction is Direction.REMOVE
        shares = (1 - self.rate if removed else 1.0) * without
        if removed:
            places = np.append(places, places + self.variance)
            shares = np.append(shares, self.rate * diffused)
        parts = zip(places.tolist(), shares.tolist(), strict=True)
        deviation = math.sqrt(self.variance)
        return mixture_quantiles(
            [part for part in parts if part[1] > _BEYOND],
            lambda tail: deviation * _NORMAL.inverse_survival(tail),
            tail,
        )

    def _outcome_masses(self, direction: Direction, ratios: Array) -> tuple[Array, Array, Array]:
        ratios, forward = unsampled_ratio(self.rate, ratios), direction is Direction.REMOVE
        diffused, without = self._masses(ratios)
        with_record = self.rate * diffused + (1 - self.rate) * without
        # omitted numbers of jumps count as infinite losses in both directions
        if forward:
            with_record[-1] += self.rate * -math.expm1(-self.killed) + _BEYOND
        else:
            without[0] += _BEYOND
        # The component farthest from a cut has the smallest tail and the largest error.
        places = _components(self)[0]
        farthest = ratios - places[0] if forward else places[-1] + self.variance - ratios
        survival_error = _NORMAL.survival_error(np.maximum(farthest / math.sqrt(self.variance), 0.0))
        return with_record, without, 4 * UNIT * (4 * survival_error + 16 * len(places) + 64)

    @property
    def _drift(self) -> float:
        return -self.killed - sum(mean * math.expm1(size * self.jump) for size, mean in self.jumps)

    def _masses(self, ratios: Array) -> tuple[Array, Array]:
        """Probabilities of W below, between and above the `ratios`, with and without the record."""
        diffused, without = np.zeros(len(ratios) + 1), np.zeros(len(ratios) + 1)
        deviation = math.sqrt(self.variance)
        for place, first, second in zip(*_components(self), strict=True):
            diffused += first * noise_masses(_NORMAL, (ratios - place - self.variance) / deviation)
            without += second * noise_masses(_NORMAL, (ratios - place) / deviation)
        return diffused, without


@lru_cache(maxsize=64)
def _components(law: JumpDiffusionLaw) -> tuple[Array, Array, Array]:
    """Components of W by total jump: means without the record, and probabilities with and without the
    record."""
    tilted = tuple((size, mean * math.exp(size * law.jump)) for size, mean in law.jumps)
    with_record, without = _compound_poisson(tilted), _compound_poisson(law.jumps)
    length = max(len(with_record), len(without))
    first, second = (np.pad(chances, (0, length - len(chances))) for chances in (with_record, without))
    places = np.arange(length, dtype=float) * law.jump + (law._drift - law.variance / 2)
    return places, math.exp(-law.killed) * first, second


def _compound_poisson(jumps: tuple[tuple[int, float], ...]) -> Array:
    """Probabilities of a total jump of 0, 1, 2, ... units; omits a probability of at most `_BEYOND`."""
    law = np.ones(1)
    for size, mean in jumps:
        weight, number, spaced = math.exp(-mean), 0, []
        while number <= mean or weight * (number + 1) / (number + 1 - mean) > _BEYOND / len(jumps) / 2:
            spaced += [weight] + [0.0] * (size - 1)
            number += 1
            weight *= mean / number
        law = np.convolve(law, spaced)
    return law


# Shifts are rounded up to powers of 2^(1/8), so certificates can be reused. Below _MIN_SHIFT the cost is
# negligible, and above _MAX_SHIFT the bound by RDP is smaller.
_PER_OCTAVE = 8
_MIN_SHIFT, _MAX_SHIFT = 0.004, 1.5
# Below this total norm the cost is negligible, and the grid would be slow.
_MIN_NORM = 1e-5
# Largest jump size in units, if the blocks have different noise.
_MAX_UNITS = 8
# Above this mean number of jumps, probabilities would underflow (exp(-746) is 0).
_MAX_JUMPS = 300.0


def rounded_shift(shift: float) -> float:
    """The shift rounded up; a step that dominates a shift also dominates smaller ones."""
    octave = math.log2(max(shift, _MIN_SHIFT))
    return float(2.0 ** (math.ceil(_PER_OCTAVE * octave + 1e-9) / _PER_OCTAVE))


def dominating_jump_diffusion(
    rate: float, coordinate_rate: float, blocks: Sequence[tuple[float, float]]
) -> JumpDiffusionLaw | None:
    """Step that dominates coordinate-sampled Gaussian noise on `blocks`, or None.

    Args:
        rate: Sampling rate of records.
        coordinate_rate: Sampling rate of coordinates.
        blocks: Largest change of a coordinate and l2 sensitivity of each block, in units of the noise.

    **Guarantee.** At every epsilon and in both directions, the hockey-stick divergence of the step is at
    least that of the mechanism: docs/guarantees/twice-sampling-pld.md.
    """
    blocks = [block for block in blocks if block[0] > 0]
    if max((norm for _, norm in blocks), default=0.0) < _MIN_NORM:
        return None
    if max(shift for shift, _ in blocks) > _MAX_SHIFT:
        return None
    # a step that dominates a shift also dominates smaller shifts
    shifts = [rounded_shift(shift) for shift, _ in blocks]
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
