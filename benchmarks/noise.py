"""A million draws of generalized Gaussian noise: hush beside SciPy, torch and numpy, in one run.

Run: OMP_NUM_THREADS=1 .venv/bin/python benchmarks/noise.py [cpu] [cuda]

Times are medians of interleaved repeats (on a CPU the time of the process, whoever else uses the
machine), as multiples of torch.randn of the same size and type on the same device, on all there are
unless some are named. On a GPU also for 32 million draws.
"""

import time

import numpy as np
import torch
from scipy import stats

from hush.core.randomness import random_bits, source_for
from hush.noise.exact.ziggurat import add_noise
from interleaved import Draw, devices, medians, print_rows

DRAWS = {"cpu": (1_000_000,), "cuda": (1_000_000, 32_000_000)}
BETAS = (1.0, 1.5, 2.0, 2.33, 4.0)
REPEATS = 15


def contenders(beta: float, dtype: torch.dtype, device: torch.device, draws: int) -> dict[str, Draw]:
    """Ways to draw; the first is what the others are measured by."""
    generator = torch.Generator(device).manual_seed(0)
    stream = source_for(device)
    shape = torch.full((draws,), 1 / beta, dtype=dtype, device=device)
    numpy = np.random.default_rng(0)
    narrow = torch.empty(0, dtype=dtype).numpy().dtype

    def torch_gamma() -> torch.Tensor:
        size = torch._standard_gamma(shape, generator=generator).pow_(1 / beta)
        return size.mul_(torch.empty_like(size).bernoulli_(0.5, generator=generator).mul_(2).sub_(1))

    def numpy_gamma() -> np.ndarray:
        power = numpy.standard_gamma(1 + 1 / beta, draws, dtype=narrow)
        return power ** narrow.type(1 / beta) * (2 * numpy.random(draws, dtype=narrow) - 1)

    variants: dict[str, Draw] = {
        "torch.randn": lambda: torch.randn(draws, generator=generator, dtype=dtype, device=device),
        "hush": lambda: add_noise(torch.zeros_like(shape), beta, 1.0, stream),
        "torch gamma": torch_gamma,
        "ChaCha20 words": lambda: random_bits(draws, stream),
    }
    if device.type == "cpu":
        variants["numpy gamma"] = numpy_gamma
        variants["SciPy gennorm"] = lambda: stats.gennorm.rvs(beta, size=draws, random_state=numpy)
    return variants


def main() -> None:
    print("| device | type | draws | way | " + " | ".join(f"beta {beta:g}" for beta in BETAS) + " |")
    print("|---|---|---|---|" + "---|" * len(BETAS))
    for device in devices():
        for dtype in (torch.float32, torch.float64):
            for draws in DRAWS[device.type]:
                clock = time.process_time if device.type == "cpu" else time.perf_counter
                spent = [
                    medians(contenders(beta, dtype, device, draws), device, REPEATS, clock)
                    for beta in BETAS
                ]
                kind = f"{device.type} | {str(dtype).removeprefix('torch.')} | {draws:,}"
                print_rows(kind, spent, lambda name: "torch.randn")


if __name__ == "__main__":
    main()
