"""Training runs side by side, and a cache of their results for a recipe that is started again."""

import hashlib
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import lru_cache, partial
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import hush

CACHE = "HUSH_RUNS"
"""Environment variable: directory of cached results; without it, none are cached."""
_SHARED = 0.9
"""Of a GPU's memory; the rest is what each process needs to be there at all."""

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


@contextmanager
def workers(processes: int | None, device: str) -> Iterator[Map]:
    """A map over so many processes; by default a core each, or four that share a GPU. One works here."""
    count = processes or (os.cpu_count() or 1 if device == "cpu" else 4)
    if processes == 1:
        yield _cached(map)
        return
    context = get_context("spawn")
    with ProcessPoolExecutor(count, context, initializer=_share, initargs=(count, device)) as pool:
        yield _cached(pool.map)


def _cached(over: Map) -> Map:
    return lambda function, items: over(partial(cached_result, function), items)


def cached_result(function: Callable[[Any], Any], item: Any) -> Any:
    """The function's result, from the cache that the environment names, if it is there.

    The key is the code of hush and its recipes, the function's name and its argument. A function that is
    defined within another one is not cached: its name does not tell what it refers to. The cache is
    trusted as code is.
    """
    folder = os.environ.get(CACHE)
    if not folder or "<locals>" in function.__qualname__:
        return function(item)
    key = pickle.dumps((_code(), function.__module__, function.__qualname__, item))
    path = Path(folder) / hashlib.sha256(key).hexdigest()
    if path.exists():
        return pickle.loads(path.read_bytes())
    result = function(item)
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(pickle.dumps(result))
    os.replace(file.name, path)  # whole or not at all: a run may be killed at any time
    return result


@lru_cache(maxsize=1)
def _code() -> str:
    """Digest of the modules of hush and of its recipes: what is charged follows from them."""
    digest = hashlib.sha256()
    for folder in (Path(hush.__file__).parent, Path(__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _share(processes: int, device: str) -> None:
    """Take no more than a share of the GPU's memory, so that there is enough for all."""
    if device.startswith("cuda"):
        import torch

        torch.cuda.set_per_process_memory_fraction(_SHARED / processes, torch.device(device).index)
