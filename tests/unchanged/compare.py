"""Whether two recordings are equal: `python -m tests.unchanged.compare BEFORE.json AFTER.json`."""

import json
import sys
from pathlib import Path

_ABSENT = "(absent)"


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """A line for every entry that is not the same in both, or in one of them only."""
    names = sorted(before.keys() | after.keys())
    pairs = ((name, before.get(name, _ABSENT), after.get(name, _ABSENT)) for name in names)
    return [f"{name}: {_formatted(old)} -> {_formatted(new)}" for name, old, new in pairs if old != new]


def _formatted(text: str) -> str:
    """The entry, with a decimal number beside a hexadecimal one."""
    return f"{text} ({float.fromhex(text)!r})" if "0x" in text else text


def main(before: str, after: str) -> int:
    """Print how many entries are equal, and every difference; return the exit code."""
    old, new = (json.loads(Path(path).read_text()) for path in (before, after))
    different = differences(old, new)
    for line in different:
        print(line)
    print(f"{len(old.keys() | new.keys()) - len(different)} entries are equal, {len(different)} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
