"""Training runs side by side."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

_SHARED = 0.9
"""Of a GPU's memory; the rest is what each process needs to be there at all."""

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


@contextmanager
def workers(processes: int | None, device: str) -> Iterator[Map]:
    """A map over so many processes; by default a core each, or four that share a GPU. One works here."""
    count = processes or (os.cpu_count() or 1 if device == "cpu" else 4)
    if processes == 1:
        yield map
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_share, initargs=(count, device)) as pool:
        yield pool.map


def _share(processes: int, device: str) -> None:
    """Take no more than a share of the GPU's memory, so that there is enough for all."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_per_process_memory_fraction(_SHARED / processes, torch.device(device).index)
