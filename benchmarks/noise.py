"""A million draws of generalized Gaussian and of bounded noise: hush beside SciPy, torch and numpy.

Run: OMP_NUM_THREADS=1 .venv/bin/python benchmarks/noise.py [cpu] [cuda]

Times are medians of interleaved repeats, as multiples of torch.randn of the same size and type on
the same device, on all there are unless some are named.
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy import stats

from hush.core.randomness import SystemSource
from hush.noise import Quantized, Rectified, StochasticSign, Truncated
from hush.noise.ziggurat import standard

DRAWS = 1_000_000
BETAS = (1.0, 1.5, 2.33, 4.0)
# On [-2, 2] around locations of this many deviations.
LOCATIONS = (0.0, 1.0, 3.0, 100.0)
REPEATS, CALLS = 15, {"cpu": 1, "cuda": 5}

Draw = Callable[[], object]


def contenders(beta: float, dtype: torch.dtype, device: torch.device) -> dict[str, Draw]:
    """Ways to draw; the first is what the others are measured by."""
    generator = torch.Generator(device).manual_seed(0)
    shape = torch.full((DRAWS,), 1 / beta, dtype=dtype, device=device)
    numpy = np.random.default_rng(0)
    narrow = torch.empty(0, dtype=dtype).numpy().dtype

    def torch_gamma() -> torch.Tensor:
        size = torch._standard_gamma(shape, generator=generator).pow_(1 / beta)
        return size.mul_(torch.empty_like(size).bernoulli_(0.5, generator=generator).mul_(2).sub_(1))

    def numpy_gamma() -> np.ndarray:
        power = numpy.standard_gamma(1 + 1 / beta, DRAWS, dtype=narrow)
        return power ** narrow.type(1 / beta) * (2 * numpy.random(DRAWS, dtype=narrow) - 1)

    ways: dict[str, Draw] = {
        "torch.randn": lambda: torch.randn(DRAWS, generator=generator, dtype=dtype, device=device),
        "hush": lambda: standard(beta, (DRAWS,), generator=generator, dtype=dtype),
        "hush, secure": lambda: standard(beta, (DRAWS,), generator=SystemSource(device), dtype=dtype),
        "torch gamma": torch_gamma,
    }
    if device.type == "cpu":
        ways["numpy gamma"] = numpy_gamma
        ways["SciPy gennorm"] = lambda: stats.gennorm.rvs(beta, size=DRAWS, random_state=numpy)
    return ways


def bounded(location: float, dtype: torch.dtype, device: torch.device) -> dict[str, Draw]:
    """Ways to draw on a fixed support; the first is what the others are measured by."""
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
    """Time a call, from an idle device to an idle device."""
    calls = CALLS[device.type]
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        draw()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def medians(ways: dict[str, Draw], device: torch.device) -> dict[str, float]:
    """Seconds each way takes, interleaved."""
    for draw in ways.values():  # builds tables
        draw()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, draw in ways.items():
            times[name].append(seconds(draw, device))
    return {name: statistics.median(spans) for name, spans in times.items()}


Ways = Callable[[float, torch.dtype, torch.device], dict[str, Draw]]


def table(name: str, values: tuple[float, ...], ways: Ways, devices: list[torch.device]) -> None:
    print(f"| device | type | way | {' | '.join(f'{name} {value:g}' for value in values)} |")
    print("|---|---|---|" + "---|" * len(values))
    for device in devices:
        for dtype in (torch.float32, torch.float64):
            spent = [medians(ways(value, dtype, device), device) for value in values]
            kind = f"{device.type} | {str(dtype).removeprefix('torch.')}"
            for way in spent[0]:
                if way == "torch.randn":
                    cells = [f"{1e3 * each[way]:.3g} ms" for each in spent]
                else:
                    cells = [f"{each[way] / each['torch.randn']:.2f}" for each in spent]
                print(f"| {kind} | {way} | {' | '.join(cells)} |")


def main() -> None:
    both = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = [torch.device(name) for name in sys.argv[1:] or both]
    table("beta", BETAS, contenders, devices)
    print()
    table("location", LOCATIONS, bounded, devices)


if __name__ == "__main__":
    main()
