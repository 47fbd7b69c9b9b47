"""Plain progress lines on standard error, for commands that work for minutes without printing."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread

_SECONDS = 10.0


@contextmanager
def progress_lines(task: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """A counter of finished items; meanwhile a line every ten seconds says how far the task is.

    Lines go to standard error, where neither a table nor JSON on standard output is disturbed. They
    come from a thread of their own: most tasks are a single call that reports nothing until it returns.

    Args:
        task: What goes on, as the line names it.
        total: Number of items to count, where there are any.

    Yields:
        A function to be called once for each item that is finished.
    """
    begun, finished, items = time.monotonic(), Event(), 0

    def count() -> None:
        nonlocal items
        items += 1

    def report() -> None:
        while not finished.wait(_SECONDS):
            counted = "" if total is None else f" {items} of {total},"
            print(
                f"hush: {task}:{counted} {time.monotonic() - begun:.0f} seconds so far",
                file=sys.stderr,
                flush=True,
            )

    reporter = Thread(target=report, daemon=True)
    reporter.start()
    try:
        yield count
    finally:
        finished.set()
        reporter.join()
