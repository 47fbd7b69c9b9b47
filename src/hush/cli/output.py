"""JSON, errors and warnings of all commands."""

import json
import sys
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
