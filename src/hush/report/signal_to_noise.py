"""Signal-to-noise ratio of a run, from public numbers."""

import math

from hush.core.errors import Unsupported
from hush.core.parts import Noise
from hush.core.plan import Plan


def signal_to_noise(plan: Plan, *, records: int, steps: int, dimension: int) -> float:
    """Upper bound on the ratio of the summed clipped gradients to the noise (root mean square norm).

    The bound assumes that every gradient has the largest norm that clipping allows, in one direction.

    Args:
        plan: Plan of one step.
        records: Number of slots.
        steps: Number of steps.
        dimension: Number of parameters.

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


def low_snr_warning(plan: Plan, records: int, steps: int, dimension: int) -> str | None:
    """A warning if the noise moves the model more than all gradients could, else None."""
    ratio = signal_to_noise(plan, records=records, steps=steps, dimension=dimension)
    if ratio >= 1:
        return None
    return (
        f"the noise is larger than the signal: over {steps} steps the records can move the {dimension} "
        f"parameters {ratio:.2g} times as far as the noise does, and only if all gradients agree. Allow "
        "a larger epsilon, a larger batch, or train fewer parameters."
    )


def _deviation(noise: Noise, norm: float) -> float:
    """Standard deviation of the noise on one coordinate."""
    law = (noise.dominating_noise(norm) or noise).exponential_power(norm)
    if law is None:
        raise Unsupported(
            f"{type(noise).__name__} has neither a density of its own nor a dominating noise, so its "
            "deviation is unknown. Give it `exponential_power` or `dominating_noise`."
        )
    beta, scale = law
    return scale * math.exp((math.lgamma(3 / beta) - math.lgamma(1 / beta)) / 2)
