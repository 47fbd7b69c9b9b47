"""Signal-to-noise ratio of a run, from public numbers: the most that records can move the model."""

import math

from hush.core.errors import Unsupported
from hush.core.parts import Noise
from hush.core.plan import Plan

DROWNED = 1.0
"""Below this ratio even gradients that all agree move the model less than the noise does."""


def signal_to_noise(plan: Plan, *, records: int, steps: int, dimension: int) -> float:
    """Upper bound on the norm of the summed clipped gradients over the noise's root mean square norm.

    An upper bound: as if every record's gradient had the largest norm that clipping allows, all in one
    direction, at every step.

    Args:
        plan: of one step.
        records: number of slots.
        steps: number of steps, whose sums and noises add up.
        dimension: number of parameters.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Poisson(rate=0.1),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=2.0),
    ... )
    >>> round(signal_to_noise(plan, records=1000, steps=4, dimension=100), 9)
    10.0
    """
    blocks = plan.clipping.sensitivity(dimension)
    noises = plan.noise.per_block(blocks, plan.clipping.reference_norm)
    variance = sum(
        block.size * _deviation(noise, norm) ** 2
        for block, (noise, norm) in zip(blocks, noises, strict=True)
    )
    signal = math.hypot(*(block.l2_radius for block in blocks)) * plan.sampling.expected(records)
    return math.sqrt(steps) * signal / math.sqrt(variance)


def drowned(plan: Plan, *, records: int, steps: int, dimension: int) -> str | None:
    """A warning where the ratio is below `DROWNED`, else None."""
    ratio = signal_to_noise(plan, records=records, steps=steps, dimension=dimension)
    if ratio >= DROWNED:
        return None
    return (
        f"the noise drowns the records: over {steps} steps they can move the {dimension} parameters "
        f"{ratio:.2g} times as far as the noise does, and only if all gradients agree. Allow a larger "
        "epsilon, a larger batch, or train fewer parameters."
    )


def _deviation(noise: Noise, norm: float) -> float:
    """Standard deviation of the noise on one coordinate."""
    law = (noise.dominating_noise(norm) or noise).exponential_power(norm)
    if law is None:
        raise Unsupported(
            f"{type(noise).__name__} has neither a density of its own nor a noise that dominates it: "
            "its deviation is not known. Give it `exponential_power` or `dominating_noise`."
        )
    beta, scale = law
    return scale * math.exp((math.lgamma(3 / beta) - math.lgamma(1 / beta)) / 2)
