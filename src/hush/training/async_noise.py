"""Work that does not depend on the records, done while gradients are computed."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

T = TypeVar("T")


@contextmanager
def in_background(work: Callable[[], T], early: bool) -> Iterator[Callable[[], T]]:
    """Give the block a function that returns the result of the work.

    With `early` the work is begun before the block, in another thread where there is a core to spare;
    else when its result is asked for. However the block ends, the work is over then.
    """
    if not early:
        yield work
        return
    if not spare_core():
        result = work()
        yield lambda: result
        return
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            yield done.result
        finally:
            _finish(done)


def _finish(work: "Future[Any]") -> None:
    """Wait for it even if the user is impatient: what it draws from must not be used by two."""
    interrupt = None
    while not work.done():
        try:
            wait([work])
        except KeyboardInterrupt as again:
            interrupt = again
    if interrupt is not None:
        raise interrupt


def spare_core() -> bool:
    """Whether this process may use more cores than torch does: its threads wait for each other."""
    allowed = getattr(os, "sched_getaffinity", None)  # not on every system
    cores = os.cpu_count() or 1 if allowed is None else len(allowed(0))
    return cores > torch.get_num_threads()
