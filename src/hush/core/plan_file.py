"""Plans as TOML files that people write."""

import re
import tomllib
from pathlib import Path
from typing import Any

from hush.core.durable import replace_file
from hush.core.errors import HushError, InvalidPlan
from hush.core.plan import Plan

EXAMPLE = """\
[sampling]
kind = "Poisson"
rate = 0.01

[clipping]
kind = "L2"
norm = 1.0

[noise]
kind = "Gaussian"
multiplier = 1.0
"""


def read_plan(path: Path) -> Plan:
    """The plan in a TOML file; an error names the line and the key at fault."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidPlan(
            f"cannot read the plan file {path}: {error}. It should look like this:\n\n{EXAMPLE}"
        ) from None
    try:
        plain = tomllib.loads(text)
    except RecursionError:
        raise InvalidPlan(
            f"{path}: not a plan: its tables or lists are nested too deeply to be read, and a plan has "
            f"two levels. It should look like this:\n\n{EXAMPLE}"
        ) from None
    except ValueError as error:  # of the format, and of integers of more digits than Python reads
        raise InvalidPlan(f"{path}: not a TOML file: {error}") from None
    try:
        return Plan.from_plain(plain)
    except HushError as error:
        line = _line_of(text, error.key)
        raise InvalidPlan(f"{path}, line {line}, key {error.key}: {error}", key=error.key) from None


def write_plan(plan: Plan, path: Path) -> None:
    """Write the plan as TOML that `read_plan` gives back unchanged; a crash leaves all of it or none."""
    replace_file(path, plan_text(plan).encode())


def plan_text(plan: Plan) -> str:
    """The plan as TOML."""
    tables = []
    for name, part in plan.to_plain().items():
        settings = (f"{key} = {_toml(value)}" for key, value in part.items())
        tables.append("\n".join([f"[{name}]", *settings, ""]))
    return "\n".join(tables)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {_toml(item)}' for key, item in value.items())}}}"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _line_of(text: str, key: str) -> int:
    """The line that sets `key` ("table.setting"), else its table's, else the last one."""
    lines = [line.partition("#")[0] for line in text.splitlines()]
    parts = key.split(".")
    for depth in range(len(parts), 0, -1):
        table = r"\s*\.\s*".join(map(re.escape, parts[:depth]))
        start = _first(rf"\s*\[?\s*{table}\s*[\]=]", lines)
        if start is None:
            continue
        section = lines[start + 1 :] if lines[start].lstrip().startswith("[") else []
        section = section[: _first(r"\s*\[", section)]
        for name in map(re.escape, parts[depth : depth + 1]):
            # a setting of its own line first: an inline table may hold one of the same name
            found = _first(rf'\s*"?{name}"?\s*=', section)
            found = _first(rf'.*\b{name}"?\s*=', section) if found is None else found
            if found is not None:
                return start + found + 2
        return start + 1
    return max(len(lines), 1)


def _first(pattern: str, lines: list[str]) -> int | None:
    """Which line is the first to begin with the pattern."""
    return next((i for i, line in enumerate(lines) if re.match(pattern, line)), None)
