"""Choice of batch size and number of steps for a budget and a compute limit, from public numbers alone.

The convergence bound of SGD for convex losses, with clipped gradients and Gaussian noise (Bassily, Smith
and Thakurta, 2014), is proportional to sqrt((1 + d (s / b)^2) / T) for T steps, d parameters, a noise
multiplier s and an expected batch of b records. The noisy run therefore makes the same progress as
T / (1 + d (s / b)^2) steps without noise. McKenna et al. (2025) fit scaling laws in the same quantities.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hush import plans
from hush.accounting.calibrate import calibrate
from hush.core.errors import BudgetExceeded
from hush.core.guarantee import Budget, check_delta
from hush.core.plan import Plan
from hush.core.value import check_count

_LEAST_BATCH, _MOST_STEPS = 16, 10**6
_ENOUGH = 0.8
"""Fraction of the best progress at which a larger batch is preferred, as it needs fewer steps."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """Batch size and steps at the compute limit, with calibrated noise."""

    plan: Plan
    batch: float
    """Expected batch size."""
    steps: int
    noise: float
    """Noise multiplier / expected batch size: noise on the mean gradient, in clipping norms."""
    effective: float
    """Number of noiseless steps with the same progress."""


def curve(
    *,
    records: int,
    parameters: int,
    budget: Budget,
    gradients: int,
    clip_norm: float = 1.0,
    done: Callable[[], None] = lambda: None,
) -> list[Point]:
    """Points of plain DP-SGD for increasing batch sizes, each with a total of `gradients` gradients.

    Batch sizes are powers of two from 16 records, and the full batch. Batch sizes that do not fit the
    budget with any noise are omitted.

    Args:
        records: Number of records.
        parameters: Number of trained parameters.
        budget: Budget of the whole run.
        gradients: Compute limit: expected total number of per-sample gradients.
        clip_norm: Clipping norm of the plans; the curve does not depend on it.
        done: Callback after each point.
    """
    for name, value in (("records", records), ("parameters", parameters), ("gradients", gradients)):
        check_count(name, value, "the curve depends on this number", at_least=1)
    check_delta(budget.delta, records)
    points = []
    for batch in _batches(records, gradients):
        steps = max(1, round(gradients / batch))
        start = plans.dpsgd(rate=batch / records, clip_norm=clip_norm)
        try:
            plan = calibrate(start, budget, steps)
        except BudgetExceeded:
            continue
        noise = plan.noise.to_plain()["multiplier"] / batch
        effective = steps / (1 + parameters * noise**2)
        points.append(Point(plan=plan, batch=batch, steps=steps, noise=noise, effective=effective))
        done()
    if not points:
        raise BudgetExceeded(f"no batch size has a plan within {budget}. Allow a larger budget.")
    return points


def best(points: Sequence[Point]) -> Point:
    """Point with the largest batch that makes at least 80% of the best point's progress."""
    most = max(point.effective for point in points)
    enough = (point for point in points if point.effective >= _ENOUGH * most)
    return max(enough, key=lambda point: point.batch)


def _batches(records: int, gradients: int) -> Iterator[int]:
    """Batch sizes with 1 to 10**6 steps: powers of two, and the full batch."""
    least = max(min(_LEAST_BATCH, records), math.ceil(gradients / _MOST_STEPS))
    batch = 2 ** math.ceil(math.log2(least))
    while batch < records and batch <= gradients:
        yield batch
        batch *= 2
    if records <= gradients or batch > gradients:
        yield min(records, gradients)


def deviation(beta: float, scale: float) -> float:
    """Standard deviation of the density proportional to exp(-(|x| / scale)^beta)."""
    return scale * math.exp((math.lgamma(3 / beta) - math.lgamma(1 / beta)) / 2)


def signal_to_noise(plan: Plan, records: int, steps: int, dimension: int) -> float:
    """Upper bound on the ratio of the norm of all summed clipped gradients to that of the noise.

    Norms are root mean squares. The ratio is infinite if neither the noise nor its dominating noise has
    a density.
    """
    blocks = plan.clipping.sensitivity(dimension)
    variance = 0.0
    noises = plan.noise.per_block(blocks, plan.clipping.reference_norm)
    for block, (noise, norm) in zip(blocks, noises, strict=True):
        law = (noise.dominating_noise(norm) or noise).exponential_power(norm)
        if law is None:
            return math.inf
        variance += block.size * deviation(*law) ** 2
    signal = math.hypot(*(block.l2_radius for block in blocks)) * plan.sampling.expected(records)
    return math.sqrt(steps) * signal / (math.sqrt(variance) * plan.noise.relative_error(steps))


def low_snr_warning(plan: Plan, records: int, steps: int, dimension: int) -> str | None:
    """Warning if the noise of a run exceeds its signal, otherwise None; uses public numbers only."""
    ratio = signal_to_noise(plan, records, steps, dimension)
    if ratio >= 1:
        return None
    return (
        f"the noise is larger than the signal: over {steps} steps, even if all gradients agree, the "
        f"signal on the {dimension} parameters is {ratio:.2g} times the noise. Allow a larger epsilon "
        "or a larger batch, or train fewer parameters. `hush plan` finds the batch size."
    )
