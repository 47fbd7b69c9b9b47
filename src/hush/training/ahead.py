"""Noise that is drawn while gradients are computed."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def ahead(work: Callable[[], None], early: bool) -> Iterator[Callable[[], None]]:
    """Do the work after the block or, if `early`, in another thread from the beginning of it.

    What an early work writes to may be used after a call of the function that the block is given. It
    raises what the work raised. However the block ends, the work is over then.
    """
    if not early:
        yield lambda: None
        work()
        return
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(work)
        yield done.result
        done.result()
