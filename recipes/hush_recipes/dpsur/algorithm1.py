"""Algorithm 1 of the DPSUR paper: Gaussian noise drawn again until the number lies in an interval.

Proof: docs/guarantees/selective.md, "Algorithm 1 on its own". The cost is that of a *fixed* number
with a hidden number of draws. DPSUR tests another proposal in each draw and releases the accepted one.
"""

import math
from typing import Any

import numpy as np
from scipy.special import log_ndtr

import hush
from hush_recipes.figure import Figure

_ORDER = 1.5
_NOISES, _THRESHOLDS = (0.8, 1.0, 1.3), (-2.0, -1.0, 0.0)
_DRAWS = 64
"""Draws at once; each round has fresh noise, and the first draw inside of the interval is released."""


def draw_inside(
    value: float,
    *,
    norm: float,
    sigma: float,
    low: float = -math.inf,
    high: float,
    seed: int | None = None,
) -> float:
    """A number plus Gaussian noise, given that the sum lies in [low, high] (Algorithm 1).

    The running time depends on the value; `conditioned_rdp` does not account for it.

    Args:
        value: Private number; clipped to [0, norm].
        norm: Sensitivity of the number.
        sigma: Noise multiplier.
        low: Lower end of the interval.
        high: Upper end of the interval.
        seed: Seed of the noise, which reveals it; by default the operating system's randomness.
    """
    import torch

    generator = None if seed is None else torch.Generator().manual_seed(seed)
    location = torch.full((_DRAWS,), min(max(value, 0.0), norm), dtype=torch.float64)
    while True:
        noisy = hush.noise.sample(
            hush.Gaussian(sigma), (_DRAWS,), norm=norm, location=location, generator=generator
        )
        inside = noisy[(noisy >= low) & (noisy <= high)]
        if len(inside):
            return float(inside[0])


def conditioned_rdp(order: float, *, sigma: float, low: float = -math.inf, high: float) -> float:
    """Renyi divergence of Algorithm 1 in the worst case; exact, and at most order / (2 sigma^2).

    Args:
        order: Order, above 1.
        sigma: Noise multiplier.
        low: Lower end of the interval, in units of the sensitivity.
        high: Upper end of the interval, in units of the sensitivity.
    """
    return max(_divergence(order, t, 1 - t, sigma, low, high) for t in (0.0, 1.0))


def counted_rdp(order: float, *, sigma: float, high: float) -> float:
    """Renyi divergence of the number of draws alone in the worst case, for a half-line (-inf, high].

    Infinite if rejections are so much rarer without the record that the moments do not exist.

    Args:
        order: Order, above 1.
        sigma: Noise multiplier.
        high: Upper end of the interval, in units of the sensitivity.
    """
    accepted = [math.exp(log_ndtr((high - t) / sigma)) for t in (0.0, 1.0)]
    worst = 0.0
    for p, q in (accepted, accepted[::-1]):
        ratio = (1 - p) ** order * (1 - q) ** (1 - order)
        if ratio >= 1:
            return math.inf
        worst = max(worst, math.log(p**order * q ** (1 - order) / (1 - ratio)) / (order - 1))
    return worst


def flipped_rdp(order: float, *, sigma: float, threshold: float) -> float:
    """Renyi divergence of a chosen proposal, for the record that flips the test (`hush claims`).

    Training leaks nothing, every record is in the test, and the record turns its clipped difference
    from one end to the other: for a share of the proposals up, for the others down.

    Args:
        order: Order, above 1.
        sigma: Noise multiplier of the test.
        threshold: Threshold, in units of the clip.
    """
    seldom, often = (math.exp(log_ndtr((threshold - end) / (2 * sigma))) for end in (1, -1))
    share = np.linspace(0.001, 0.999, 999)
    p = share * often / (share * often + (1 - share) * seldom)
    q = share * seldom / (share * seldom + (1 - share) * often)
    moments = p**order * q ** (1 - order) + (1 - p) ** order * (1 - q) ** (1 - order)
    return float(np.log(moments.max())) / (order - 1)


def dpsur_algorithm1() -> Figure:
    """Cost of noise conditioned on acceptance, for a fixed number and for a chosen model."""
    rows: list[list[Any]] = []
    for sigma in _NOISES:
        for threshold in _THRESHOLDS:
            high = (threshold + 1) / 2  # the test's range [-clip, clip] as [0, 1]
            rows.append(
                [
                    *(sigma, threshold, _ORDER / (2 * sigma**2)),
                    conditioned_rdp(_ORDER, sigma=sigma, high=high),
                    counted_rdp(_ORDER, sigma=sigma, high=high),
                    flipped_rdp(_ORDER, sigma=sigma, threshold=threshold),
                ]
            )

    def draw(panels: Any) -> None:
        for axes, sigma in zip(panels, _NOISES, strict=True):
            at_noise = [row for row in rows if row[0] == sigma]
            for column, name in ((2, "published"), (3, "fixed number"), (5, "chosen model, at least")):
                axes.plot(
                    [row[1] for row in at_noise], [row[column] for row in at_noise], "o-", label=name
                )
            axes.set(
                xlabel="threshold over the clip", ylabel="divergence", title=f"test noise {sigma:g}"
            )
        panels[0].legend(fontsize=8)

    return Figure(
        name="dpsur-algorithm1",
        title=f"Noise conditioned on acceptance: Rényi divergence of order {_ORDER:g}",
        header=[
            *("test noise", "threshold", "published", "fixed number", "number of draws alone"),
            "chosen model, at least",
        ],
        rows=rows,
        draw=draw,
        panels=len(_NOISES),
        notes=[
            "published: Theorem 4.1, order / (2 sigma^2). It holds for a fixed number",
            "fixed number: the exact cost of Algorithm 1 with a hidden number of draws",
            "chosen model, which DPSUR releases: the record that flips the test",
        ],
    )


def _divergence(
    order: float, first: float, second: float, sigma: float, low: float, high: float
) -> float:
    def log_mass(location: float) -> float:
        a, b = (low - location) / sigma, (high - location) / sigma
        a, b = (-b, -a) if a > 0 else (a, b)  # in the lower tail, where log_ndtr is accurate
        return float(log_ndtr(b) + np.log1p(-np.exp(log_ndtr(a) - log_ndtr(b))))

    tilted = order * first + (1 - order) * second
    excess = log_mass(tilted) - order * log_mass(first) - (1 - order) * log_mass(second)
    return order * (first - second) ** 2 / (2 * sigma**2) + excess / (order - 1)
