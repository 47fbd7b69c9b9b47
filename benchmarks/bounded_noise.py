"""A million draws of normal noise on a fixed support: hush beside SciPy's truncnorm, in one run.

Run: OMP_NUM_THREADS=1 .venv/bin/python benchmarks/bounded_noise.py [cpu] [cuda]

Times are medians of interleaved repeats, as multiples of torch.randn of the same size and type on
the same device, on all there are unless some are named. On the CPU it is processor time: that of one
thread, whoever else is at work.
"""

import math
import time

import numpy as np
import torch
from scipy import stats

from hush.noise import Quantized, Rectified, StochasticSign, Truncated
from interleaved import Draw, devices, medians, print_rows

DRAWS, REPEATS = 2**20, 7
PART = 2**16
# On [-2, 2] around locations of this many deviations.
LOCATIONS = (0.0, 1.0, 3.0, 100.0)


def smallest(
    location: float, dtype: torch.dtype, device: torch.device, generator: torch.Generator
) -> Draw:
    """A uniform number, the cdf at both ends of the support, and its inverse, each once and in place.

    Right near the middle of the support only, without care for rounding: no way to draw by torch's
    operations that inverts the cdf takes less.
    """
    around, above = (torch.empty(PART, dtype=dtype, device=device) for _ in range(2))
    share = torch.empty_like(around)
    root = math.sqrt(0.5)

    def draw() -> None:
        for _ in range(DRAWS // PART):
            around.fill_(location)
            share.uniform_(generator=generator)
            torch.neg(around, out=above).add_(2.0).mul_(root).erf_()
            below = around.add_(2.0).mul_(-root).erf_()
            torch.lerp(below, above, share, out=share).erfinv_().div_(root)

    return draw


def contenders(location: float, dtype: torch.dtype, device: torch.device) -> dict[str, Draw]:
    """Ways to draw; the first is what the others are measured by."""
    generator = torch.Generator(device).manual_seed(0)
    around = torch.empty(DRAWS, dtype=dtype, device=device)
    numpy = np.random.default_rng(0)
    variants: dict[str, Draw] = {
        "torch.randn": lambda: torch.randn(DRAWS, generator=generator, dtype=dtype, device=device)
    }
    for noise in (
        Rectified(scale=1.0, bound=2.0),
        Truncated(scale=1.0, bound=2.0),
        StochasticSign(scale=1.0),
        Quantized(scale=1.0, bound=2.0, levels=16),
    ):
        variants[type(noise).__name__] = lambda noise=noise: noise.privatize(
            around.fill_(location), norm=1.0, generator=generator
        )
    variants["least of an inverse cdf"] = smallest(location, dtype, device, generator)
    if device.type == "cpu":
        ends = (-2 - location, 2 - location)
        variants["SciPy truncnorm"] = lambda: stats.truncnorm.rvs(
            *ends, loc=location, size=DRAWS, random_state=numpy
        )
    return variants


def main() -> None:
    print(
        "| device | type | way | "
        + " | ".join(f"location {location:g}" for location in LOCATIONS)
        + " |"
    )
    print("|---|---|---|" + "---|" * len(LOCATIONS))
    for device in devices():
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        for dtype in (torch.float32, torch.float64):
            spent = [
                medians(contenders(location, dtype, device), device, REPEATS, clock)
                for location in LOCATIONS
            ]
            kind = f"{device.type} | {str(dtype).removeprefix('torch.')}"
            print_rows(kind, spent, lambda variant: "torch.randn")


if __name__ == "__main__":
    main()
