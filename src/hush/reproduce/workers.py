"""Training runs side by side."""

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

Map = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


@contextmanager
def workers(processes: int | None, device: str) -> Iterator[Map]:
    """A map over so many processes; by default a core each, or four that share a GPU. One works here."""
    usual = os.cpu_count() if device == "cpu" else 4
    if processes == 1:
        yield map
        return
    with ProcessPoolExecutor(processes or usual, mp_context=get_context("spawn")) as pool:
        yield pool.map
