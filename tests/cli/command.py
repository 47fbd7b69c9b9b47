"""Run `hush` with arguments in this process, without its import time."""

import contextlib
import io
import json
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from hush.cli.main import main


@dataclass(frozen=True)
class Result:
    """Exit status and output of a command."""

    returncode: int
    stdout: str
    stderr: str


def call(*arguments: object, cwd: Path | None = None) -> Result:
    """Run the command; warnings are printed, not raised."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    environment = {"COLUMNS": "100", "NO_COLOR": "1"}
    with (
        mock.patch.object(sys, "argv", ["hush", *map(str, arguments)]),
        mock.patch.dict("os.environ", environment),
        contextlib.chdir(cwd or "."),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("default")
        try:
            main()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(end.code is not None)
    return Result(status, out.getvalue(), err.getvalue())


def answer(*arguments: object, cwd: Path | None = None) -> dict[str, Any]:
    """The JSON object that a command prints."""
    result = call(*arguments, "--json", cwd=cwd)
    assert result.returncode == 0, result.stderr
    value: dict[str, Any] = json.loads(result.stdout)
    return value
