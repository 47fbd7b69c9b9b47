"""A million draws of generalized Gaussian noise: hush beside SciPy, torch and numpy, in one run.

Run: OMP_NUM_THREADS=1 .venv/bin/python benchmarks/noise.py [cpu] [cuda]

Times are medians of interleaved repeats, as multiples of torch.randn of the same size and type on
the same device, on all there are unless some are named. On a GPU also for 32 million draws, and for
noise that is added to a tensor in place, as a multiple of torch.randn and an addition.
"""

import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy import stats

from hush.core.randomness import SystemSource
from hush.noise import Gaussian, GeneralizedGaussian
from hush.noise.ziggurat import standard

DRAWS = {"cpu": (1_000_000,), "cuda": (1_000_000, 32_000_000)}
BETAS = (1.0, 1.5, 2.33, 4.0)
REPEATS, CALLS = 15, {"cpu": 1, "cuda": 5}

Draw = Callable[[], object]
ADDED = "torch.randn, added"


def contenders(beta: float, dtype: torch.dtype, device: torch.device, draws: int) -> dict[str, Draw]:
    """Ways to draw; the first is what the others are measured by."""
    generator = torch.Generator(device).manual_seed(0)
    shape = torch.full((draws,), 1 / beta, dtype=dtype, device=device)
    numpy = np.random.default_rng(0)
    narrow = torch.empty(0, dtype=dtype).numpy().dtype

    def torch_gamma() -> torch.Tensor:
        size = torch._standard_gamma(shape, generator=generator).pow_(1 / beta)
        return size.mul_(torch.empty_like(size).bernoulli_(0.5, generator=generator).mul_(2).sub_(1))

    def numpy_gamma() -> np.ndarray:
        power = numpy.standard_gamma(1 + 1 / beta, draws, dtype=narrow)
        return power ** narrow.type(1 / beta) * (2 * numpy.random(draws, dtype=narrow) - 1)

    ways: dict[str, Draw] = {
        "torch.randn": lambda: torch.randn(draws, generator=generator, dtype=dtype, device=device),
        "hush": lambda: standard(beta, (draws,), generator=generator, dtype=dtype),
        "hush, secure": lambda: standard(beta, (draws,), generator=SystemSource(device), dtype=dtype),
        "torch gamma": torch_gamma,
    }
    if device.type == "cuda":
        target = torch.zeros(draws, dtype=dtype, device=device)
        noise = GeneralizedGaussian(beta=beta, multiplier=1.0)
        normal = Gaussian(multiplier=1.0)
        ways[ADDED] = lambda: normal.around(target, norm=1.0, generator=generator)
        ways["hush, added"] = lambda: noise.around(target, norm=1.0, generator=generator)
    if device.type == "cpu":
        ways["numpy gamma"] = numpy_gamma
        ways["SciPy gennorm"] = lambda: stats.gennorm.rvs(beta, size=draws, random_state=numpy)
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


def medians(beta: float, dtype: torch.dtype, device: torch.device, draws: int) -> dict[str, float]:
    """Seconds each way takes, interleaved."""
    ways = contenders(beta, dtype, device, draws)
    for draw in ways.values():  # builds tables
        draw()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, draw in ways.items():
            times[name].append(seconds(draw, device))
    return {name: statistics.median(spans) for name, spans in times.items()}


def main() -> None:
    both = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    devices = [torch.device(name) for name in sys.argv[1:] or both]
    print("| device | type | draws | way | " + " | ".join(f"beta {beta:g}" for beta in BETAS) + " |")
    print("|---|---|---|---|" + "---|" * len(BETAS))
    for device in devices:
        for dtype in (torch.float32, torch.float64):
            for draws in DRAWS[device.type]:
                spent = [medians(beta, dtype, device, draws) for beta in BETAS]
                kind = f"{device.type} | {str(dtype).removeprefix('torch.')} | {draws:,}"
                for way in spent[0]:
                    if way in ("torch.randn", ADDED):
                        cells = [f"{1e3 * each[way]:.3g} ms" for each in spent]
                    else:
                        by = ADDED if way == "hush, added" else "torch.randn"
                        cells = [f"{each[way] / each[by]:.2f}" for each in spent]
                    print(f"| {kind} | {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
