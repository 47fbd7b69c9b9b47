"""JSON, errors, warnings and progress of all commands."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any, TextIO

from hush.core.errors import shorten
from hush.core.ranges import finite_or_none

SEED_NOTICE = (
    "the noise came from a known seed: the guarantee holds only while the seed stays secret and serves "
    "no other run"
)


def counted(number: int, noun: str) -> str:
    """A number of things, in words: "1 step", "2 steps"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object; infinities become null, which every reader understands."""
    print(json.dumps(finite_or_none(value)))


def print_error(message: object) -> None:
    """Print one message of hush on standard error, short enough to read."""
    print(f"hush: {shorten(str(message))}", file=sys.stderr)


def print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line: where in the code it arose helps nobody at the command line.

    Takes the place of `warnings.showwarning`, whose arguments these are.
    """
    print_error(f"warning: {' '.join(str(message).split())}")


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
