"""How commands print."""

import json
import math
import sys
from typing import Any, TextIO

from hush.core.errors import shorten


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object; what is infinite becomes null, which every reader understands."""
    print(json.dumps(_finite(value)))


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


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
