"""How far the records can move a model at most, beside how far noise moves it."""

import math

from hush.core.parts import Noise
from hush.core.plan import Plan

DROWNED = 1.0
"""Below this even gradients that all agree move the model less than the noise does."""


def signal_to_noise(plan: Plan, *, records: int, steps: int, dimension: int) -> float:
    """The length of all clipped sums together, at most, over the root mean square of the noise on them.

    At most: as if every record pushed as far as the clipping lets it, all in one direction, at every
    step. From public numbers alone.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Poisson(rate=0.1),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=2.0),
    ... )
    >>> round(signal_to_noise(plan, records=1000, steps=4, dimension=100), 9)
    10.0
    """
    balls = plan.clipping.sensitivity(dimension)
    noises = plan.noise.per_block(balls, plan.clipping.reference_norm)
    variance = sum(
        ball.size * _deviation(noise, norm) ** 2
        for ball, (noise, norm) in zip(balls, noises, strict=True)
    )
    push = math.hypot(*(ball.l2_radius for ball in balls)) * plan.sampling.expected(records)
    return math.sqrt(steps) * push / math.sqrt(variance)


def drowned(plan: Plan, *, records: int, steps: int, dimension: int) -> str | None:
    """A warning where the noise is all there will be to see."""
    ratio = signal_to_noise(plan, records=records, steps=steps, dimension=dimension)
    if ratio >= DROWNED:
        return None
    return (
        f"the noise drowns the records: over {steps} steps they can move the {dimension} parameters "
        f"{ratio:.2g} times as far as the noise does, and only if all gradients agree. Allow a larger "
        "epsilon, a larger batch, or train fewer parameters."
    )


def _deviation(noise: Noise, norm: float) -> float:
    law = (noise.dominating_noise(norm) or noise).exponential_power(norm)
    assert law is not None, "a noise is charged by its law or by one that dominates it"
    beta, scale = law
    return scale * math.exp((math.lgamma(3 / beta) - math.lgamma(1 / beta)) / 2)
