"""Noise that is drawn while gradients are computed."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager

import torch


@contextmanager
def ahead(work: Callable[[], None], early: bool) -> Iterator[Callable[[], None]]:
    """Do the work after the block or, if `early`, before it: meanwhile, where there is a core to spare.

    What an early work writes to may be used after a call of the function that the block is given. It
    raises what the work raised. However the block ends, the work is over then.
    """
    if not early:
        yield lambda: None
        work()
        return
    if not spare_core():
        work()
        yield lambda: None
        return
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        try:
            yield done.result
        finally:
            _finish(done)
        done.result()


def _finish(work: "Future[None]") -> None:
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
