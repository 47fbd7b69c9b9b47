"""JSON, errors and warnings of all commands."""

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from hush.core.errors import HushError, shorten
from hush.core.guarantee import Guarantee
from hush.core.value import finite_or_none

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


def print_run(guarantee: Guarantee, facts: dict[str, Any], seed: int | None, folder: Path) -> None:
    """Print the result of a run as JSON.

    Args:
        guarantee: Guarantee of the run.
        facts: Other results.
        seed: Seed that was passed.
        folder: Folder of the run.
    """
    where = {"seeded": seed is not None, "directory": str(folder)}
    print_json({"guarantee": guarantee.to_plain(), **facts, **where})


def run_app(app: Callable[[], object]) -> None:
    """Run a command line; errors of hush and warnings are printed as a line, without a traceback."""
    warnings.showwarning = _print_warning
    try:
        app()
    except (OSError, HushError) as error:
        print_error(_file_error(error) if isinstance(error, OSError) else error)
        sys.exit(2)


def _file_error(error: OSError) -> str:
    """The file, the reason and the way out."""
    if error.filename is None or error.errno is None or error.strerror is None:
        return str(error)
    if error.strerror != os.strerror(error.errno):  # an explanation of our own
        return f"{error.filename} {error.strerror}"
    return (
        f"{error.filename} cannot be used ({error.strerror}): the command reads or writes files there. "
        "Name another path, permit it, or make room."
    )


def print_error(message: object) -> None:
    """Print one message of hush on standard error, short enough to read."""
    print(f"hush: {shorten(str(message))}", file=sys.stderr)


def _print_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line, without its place in the code (for `warnings.showwarning`)."""
    print_error(f"warning: {' '.join(str(message).split())}")
