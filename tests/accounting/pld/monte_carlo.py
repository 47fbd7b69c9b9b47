"""Monte Carlo epsilon with a confidence band: an oracle, which shares no code with the accountant.

The generalized Gaussian paper accounts with a histogram of sampled losses. A sample says nothing of
losses beyond its largest (`hush claims`, its Theorem 6), so this enters no guarantee.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hush.accounting.pld.privacy_loss import Array
from hush.accounting.steps import SampledGaussian, SampledNoise

_CHUNK = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Band:
    """An estimate of epsilon, and an interval that holds the true one with some confidence."""

    lower: float
    estimate: float
    upper: float
    confidence: float


def epsilon(
    counts: Mapping[SampledNoise | SampledGaussian, int],
    delta: float,
    *,
    samples: int = 100_000,
    confidence: float = 0.99,
    seed: int = 0,
) -> Band:
    """Confidence band for the epsilon of a composition at `delta`.

    Losses of all steps are drawn and summed, `samples` times in each direction of adding and removing
    a record. delta(e) is the mean of (1 - exp(e - loss))+, which lies in [0, 1]: by the empirical
    Bernstein bound (Maurer and Pontil 2009) an interval around the sample mean holds it, and the band
    is the set of all e whose interval holds `delta`. Its upper end is infinite where too few losses
    were drawn to tell.
    """
    wrong = 1 - confidence
    rng = np.random.default_rng(seed)
    ends = np.zeros(3)
    for sign in (1, -1):
        losses = np.sort(_losses(counts, sign, samples, rng))
        # a quarter of the chance to be wrong for each direction and side
        ends = np.maximum(ends, _crossings(losses, delta, wrong / 4))
    lower, estimate, upper = ends
    return Band(lower=lower, estimate=estimate, upper=upper, confidence=confidence)


def _losses(
    counts: Mapping[SampledNoise | SampledGaussian, int],
    sign: int,
    samples: int,
    rng: np.random.Generator,
) -> Array:
    """Sums of the losses of all steps: a record removed (1) or added (-1)."""
    total = np.zeros(samples)
    for start in range(0, samples, _CHUNK):
        part = total[start : start + _CHUNK]
        for step, count in counts.items():
            beta, scale = _law(step)
            for _ in range(count):
                noise = scale * rng.standard_gamma(1 / beta, len(part)) ** (1 / beta)
                outcome = np.where(rng.random(len(part)) < 0.5, noise, -noise)
                if sign > 0:  # the law with the record in it: a mixture
                    outcome += rng.random(len(part)) < step.rate
                ratio = np.abs(outcome / scale) ** beta - np.abs((outcome - 1) / scale) ** beta
                rest = math.log1p(-step.rate) if step.rate < 1 else -math.inf
                part += sign * np.logaddexp(rest, math.log(step.rate) + ratio)
    return total


def _law(step: SampledNoise | SampledGaussian) -> tuple[float, float]:
    if isinstance(step, SampledGaussian):
        return 2.0, step.multiplier * math.sqrt(2)
    return step.beta, step.scale


def _crossings(losses: Array, delta: float, wrong: float) -> Array:
    """The epsilons at which the interval's lower end, the mean, and its upper end fall to delta."""
    n = len(losses)
    log = math.log(2 / wrong)

    def ends(epsilon: float) -> Array:
        values = -np.expm1(np.minimum(epsilon - losses[losses > epsilon], 0.0))
        mean = float(values.sum()) / n
        variance = max(float((values**2).sum()) - n * mean**2, 0.0) / (n - 1)
        margin = math.sqrt(2 * variance * log / n) + 7 * log / (3 * (n - 1))
        return np.array([mean - margin, mean, mean + margin])

    estimates = []
    for end in range(3):
        low, high = 0.0, max(float(losses[-1]), 0.0)
        if ends(high)[end] > delta:
            estimates.append(math.inf)
            continue
        if ends(low)[end] <= delta:
            estimates.append(0.0)
            continue
        while high - low > 1e-6 * max(1.0, low):
            middle = (low + high) / 2
            low, high = (middle, high) if ends(middle)[end] > delta else (low, middle)
        estimates.append(high)
    return np.array(estimates)
