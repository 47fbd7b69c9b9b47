"""Output of all commands: JSON, text, errors and warnings."""

import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hush.core.errors import HushError, shorten
from hush.core.guarantee import Guarantee
from hush.core.value import finite_or_none


def counted(number: int, noun: str) -> str:
    """Number with its noun in singular or plural, e.g. "2 steps"."""
    return f"{number} {noun}{'s' * (number != 1)}"


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object; numbers that are not finite become null."""
    print(json.dumps(finite_or_none(value)))


def print_run(
    guarantee: Guarantee,
    facts: dict[str, Any],
    lines: Sequence[str],
    *,
    seed: int | None,
    folder: Path,
    as_json: bool,
) -> None:
    """Print the result of a run: the guarantee and `facts` as JSON, or `lines` as text."""
    if as_json:
        where = {"seeded": seed is not None, "directory": str(folder)}
        print_json({"guarantee": guarantee.to_plain(), **facts, **where})
        return
    print(*lines, sep="\n")
    if seed is not None:
        print(
            "the run was seeded: the guarantee holds only if the seed stays secret and no other run "
            "uses it"
        )


def run_app(app: Callable[[], object]) -> None:
    """Run a command line; print warnings and errors of hush in one line, without a traceback."""
    warnings.showwarning = lambda message, *_, **__: print_error(
        f"warning: {' '.join(str(message).split())}"
    )
    try:
        app()
    except (OSError, HushError) as error:
        print_error(_file_error(error) if isinstance(error, OSError) else error)
        sys.exit(2)


def _file_error(error: OSError) -> str:
    if error.filename is None or error.errno is None or error.strerror is None:
        return str(error)
    if error.strerror != os.strerror(error.errno):  # a message of hush
        return f"{error.filename} {error.strerror}"
    return (
        f"{error.filename} cannot be used ({error.strerror}): the command reads or writes files there. "
        "Pass another path, change the permissions, or free disk space."
    )


def print_error(message: object) -> None:
    print(f"hush: {shorten(str(message))}", file=sys.stderr)
