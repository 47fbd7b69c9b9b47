"""Python code run in processes of their own, which do not have to import anything first."""

import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

multiprocessing.set_forkserver_preload(["tests.preloaded"])


@dataclass(frozen=True)
class Ended:
    """How a process ended, and what it said."""

    returncode: int | None
    """Minus the signal, where one killed it."""
    stdout: str
    stderr: str


def run(code: str, *arguments: str) -> Ended:
    """Run code as `python -c` does, in a fork of a process that has imported hush and done nothing.

    An interpreter that ends is not the same: exit handlers of modules do not run.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder, name) for name in ("stdout", "stderr")]
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=_execute, args=(code, arguments, said))
        process.start()
        process.join()
        return Ended(process.exitcode, *(path.read_text() for path in said))


def _execute(code: str, arguments: tuple[str, ...], said: list[Path]) -> None:
    for stream, path in zip((1, 2), said, strict=True):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), stream)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
