"""A million draws of normal noise on a fixed support: hush beside SciPy's truncnorm, in one run.

Run: OMP_NUM_THREADS=1 .venv/bin/python benchmarks/bounded_noise.py [cpu] [cuda]

Times are medians of interleaved repeats, as multiples of torch.randn of the same size and type on
the same device, on all there are unless some are named. On the CPU it is processor time: that of one
thread, whoever else is at work.
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy import stats

from hush.noise import Quantized, Rectified, StochasticSign, Truncated
from noise import seconds as elapsed

DRAWS, REPEATS = 1_000_000, 7
# On [-2, 2] around locations of this many deviations.
LOCATIONS = (0.0, 1.0, 3.0, 100.0)

Draw = Callable[[], object]


def contenders(location: float, dtype: torch.dtype, device: torch.device) -> dict[str, Draw]:
    """Ways to draw; the first is what the others are measured by."""
    generator = torch.Generator(device).manual_seed(0)
    around = torch.empty(DRAWS, dtype=dtype, device=device)
    numpy = np.random.default_rng(0)
    ways: dict[str, Draw] = {
        "torch.randn": lambda: torch.randn(DRAWS, generator=generator, dtype=dtype, device=device)
    }
    for noise in (
        Rectified(scale=1.0, bound=2.0),
        Truncated(scale=1.0, bound=2.0),
        StochasticSign(scale=1.0),
        Quantized(scale=1.0, bound=2.0, levels=16),
    ):
        ways[type(noise).__name__] = lambda noise=noise: noise.around(
            around.fill_(location), norm=1.0, generator=generator
        )
    if device.type == "cpu":
        ends = (-2 - location, 2 - location)
        ways["SciPy truncnorm"] = lambda: stats.truncnorm.rvs(
            *ends, loc=location, size=DRAWS, random_state=numpy
        )
    return ways


def seconds(draw: Draw, device: torch.device) -> float:
    if device.type != "cpu":
        return elapsed(draw, device)
    start = time.process_time()
    draw()
    return time.process_time() - start


def medians(location: float, dtype: torch.dtype, device: torch.device) -> dict[str, float]:
    """Seconds each way takes, interleaved."""
    ways = contenders(location, dtype, device)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, draw in ways.items():
            times[name].append(seconds(draw, device))
    return {name: statistics.median(spans) for name, spans in times.items()}


def main() -> None:
    both = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = [torch.device(name) for name in sys.argv[1:] or both]
    print("| device | type | way | " + " | ".join(f"location {each:g}" for each in LOCATIONS) + " |")
    print("|---|---|---|" + "---|" * len(LOCATIONS))
    for device in devices:
        for dtype in (torch.float32, torch.float64):
            spent = [medians(location, dtype, device) for location in LOCATIONS]
            kind = f"{device.type} | {str(dtype).removeprefix('torch.')}"
            for way in spent[0]:
                if way == "torch.randn":
                    cells = [f"{1e3 * each[way]:.3g} ms" for each in spent]
                else:
                    cells = [f"{each[way] / each['torch.randn']:.2f}" for each in spent]
                print(f"| {kind} | {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
