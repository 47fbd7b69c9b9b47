"""How commands print."""

import json
import sys
from typing import Any, TextIO

from hush.core.errors import shorten
from hush.core.number import finite_or_none


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object; what is infinite becomes null, which every reader understands."""
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
