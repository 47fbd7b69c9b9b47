"""Training runs side by side, and results of runs that are kept for a recipe that is started again."""

import hashlib
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

KEPT = "HUSH_RUNS"
"""Environment variable: a directory for results of runs. None: they are not kept."""
_SHARED = 0.9
"""Of a GPU's memory; the rest is what each process needs to be there at all."""

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


@contextmanager
def workers(processes: int | None, device: str) -> Iterator[Map]:
    """A map over so many processes; by default a core each, or four that share a GPU. One works here."""
    count = processes or (os.cpu_count() or 1 if device == "cpu" else 4)
    if processes == 1:
        yield _kept(map)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_share, initargs=(count, device)) as pool:
        yield _kept(pool.map)


def _kept(over: Map) -> Map:
    return lambda function, items: over(partial(result_of, function), items)


def result_of(function: Callable[[Any], Any], item: Any) -> Any:
    """The function's result, on disk once it is there where the environment has `HUSH_RUNS`.

    Kept by the function's name and its argument, not by its code: a directory is for one version. It is
    trusted as code is.
    """
    folder = os.environ.get(KEPT)
    if not folder:
        return function(item)
    asked = pickle.dumps((function.__module__, function.__qualname__, item))
    path = Path(folder) / hashlib.sha256(asked).hexdigest()
    if path.exists():
        return pickle.loads(path.read_bytes())
    result = function(item)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_bytes(pickle.dumps(result))
    written.replace(path)  # whole or not at all: a run may be killed at any time
    return result


def _share(processes: int, device: str) -> None:
    """Take no more than a share of the GPU's memory, so that there is enough for all."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_per_process_memory_fraction(_SHARED / processes, torch.device(device).index)
