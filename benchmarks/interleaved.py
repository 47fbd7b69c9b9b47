"""Interleaved timing of several variants, so that all share the machine's load."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Draw = Callable[[], object]
CALLS = {"cpu": 1, "cuda": 5}
"""Calls of a variant in each round: the first on a GPU finds the host's caches full of another's."""


def devices() -> list[torch.device]:
    """Devices named on the command line, or all available ones."""
    available = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [torch.device(name) for name in sys.argv[1:] or available]


def medians(
    variants: Mapping[str, Draw],
    device: torch.device,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of each variant, after one call that builds tables and has memory at hand."""
    for draw in variants.values():
        draw()
    times = rounds(variants, device, repeats, clock, calls=CALLS[device.type])
    return {name: statistics.median(spans) for name, spans in times.items()}


def rounds(
    variants: Mapping[str, Draw],
    device: torch.device,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    calls: int = 1,
    limit: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of a call of each variant, round after round; no new round after `limit` seconds."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    end = time.perf_counter() + limit
    for done in range(repeats):
        if done and time.perf_counter() > end:
            break
        for name, draw in variants.items():
            times[name].append(_seconds(draw, device, clock, calls))
    return times


def ratio(times: Sequence[float], base: Sequence[float]) -> float:
    """Median over rounds of a variant's time over that of another in the same round."""
    return statistics.median(a / b for a, b in zip(times, base, strict=True))


def _seconds(draw: Draw, device: torch.device, clock: Callable[[], float], calls: int) -> float:
    """Time a call, from an idle device to an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = clock()
    for _ in range(calls):
        draw()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / calls


def print_rows(kind: str, spent: Sequence[Mapping[str, float]], by: Callable[[str], str]) -> None:
    """Print a row a variant: its time over that of the variant `by` names, or in milliseconds."""
    for name in spent[0]:
        base = by(name)
        cells = [
            f"{1e3 * times[name]:.3g} ms" if base == name else f"{times[name] / times[base]:.2f}"
            for times in spent
        ]
        print(f"| {kind} | {name} | {' | '.join(cells)} |")
