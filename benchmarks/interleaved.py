"""Interleaved timing of several samplers, for the noise benchmarks."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Draw = Callable[[], object]
_CALLS = {"cpu": 1, "cuda": 5}


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
    """Median seconds of each variant; calls are interleaved, so that all share the machine's load."""
    for draw in variants.values():  # builds tables, and has memory at hand
        draw()
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, draw in variants.items():
            times[name].append(_seconds(draw, device, clock))
    return {name: statistics.median(spans) for name, spans in times.items()}


def _seconds(draw: Draw, device: torch.device, clock: Callable[[], float]) -> float:
    """Time a call, from an idle device to an idle device."""
    calls = _CALLS[device.type]
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
