"""Timing several ways to draw a million numbers side by side: what the noise benchmarks share."""

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch

Draw = Callable[[], object]
_CALLS = {"cpu": 1, "cuda": 5}


def devices() -> list[torch.device]:
    """Those named on the command line, or all there are."""
    both = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
    return [torch.device(name) for name in sys.argv[1:] or both]


def medians(
    ways: Mapping[str, Draw],
    device: torch.device,
    repeats: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Seconds each way takes, one after the other in turn, so that all have the same company."""
    for draw in ways.values():  # builds tables, and has memory at hand
        draw()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, draw in ways.items():
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
    """A row a way: as a multiple of the way that `by` names, or milliseconds where that is itself."""
    for way in spent[0]:
        base = by(way)
        cells = [
            f"{1e3 * each[way]:.3g} ms" if base == way else f"{each[way] / each[base]:.2f}"
            for each in spent
        ]
        print(f"| {kind} | {way} | {' | '.join(cells)} |")
