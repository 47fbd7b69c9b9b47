"""Options of `hush.train` by name alone, for tests that change one at a time."""

from typing import Any

import hush

_CHECKPOINTS = ("directory", "resume", "reseed", "settings")
_LOGGING = ("every", "callbacks", "progress")


def grouped(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with those of `hush.Checkpoints` and `hush.Logging` in these groups."""
    rest = {name: value for name, value in options.items() if name not in _CHECKPOINTS + _LOGGING}
    checkpoints = {name: options[name] for name in _CHECKPOINTS if name in options}
    logging = {name: options[name] for name in _LOGGING if name in options}
    return {**rest, "checkpoints": hush.Checkpoints(**checkpoints), "logging": hush.Logging(**logging)}
