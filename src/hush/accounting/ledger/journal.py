"""The journal of a ledger: its state in memory and the lines on disk, which always agree.

A line is on disk before the state counts it. `state.py` says what the lines are.
"""

import os
from pathlib import Path
from typing import Any

from hush.accounting.ledger.hash_chain import chained, text_of
from hush.accounting.ledger.locked_file import LockedFile
from hush.accounting.ledger.state import Damaged, LedgerState
from hush.core.errors import LedgerError


class Journal:
    """The state of a ledger, and its file if it has a path: one writer, append only."""

    def __init__(self, path: Path | None, read_only: bool) -> None:
        self._file: LockedFile | None = None
        self.path = path
        self.state = LedgerState()
        self.writable = not read_only
        self.mirrored = False
        """Whether it is a copy in memory of a journal that another process writes."""
        self._process = os.getpid()
        if path is None:
            return
        if not read_only:
            self._file = LockedFile(path, self.state.header)
        try:
            self._read(path)
        except BaseException:
            self.close()
            raise

    @property
    def title(self) -> str:
        """The ledger as messages name it."""
        return "the ledger in memory" if self.path is None else f"the ledger {self.path}"

    def append(self, entry: dict[str, Any]) -> None:
        """Put one entry on disk, then count it."""
        text = text_of(entry)
        line, digest = chained(text, self.state.chain)
        self._write(line)
        self.state.apply(entry, text, digest)

    def fold(self, run: str, step: int) -> None:
        """Replace all lines by one, without the releases of a run up to a step."""
        self.state.runs[run].fold(step)
        if self._file is not None:
            try:
                self._file.replace(self.state.folded_lines())
            except BaseException:
                self.writable = False  # the state and the file may differ
                raise

    def close(self) -> None:
        """Release the file and its lock."""
        self.writable = False
        if self._file is not None:
            self._file.close()
            self._file = None

    def __del__(self) -> None:
        self.close()

    def check_writable(self) -> None:
        """Raise unless an entry can be appended by this process."""
        if not self.writable:
            raise LedgerError(
                f"{self.title} is closed or could not be written: without a charge on "
                "record the step must not be applied. Open it again to go on."
            )
        self.check_process()

    def check_process(self) -> None:
        """Raise in a fork of the process that opened it."""
        if os.getpid() != self._process:
            raise LedgerError(
                f"{self.title} was opened by process {self._process} and this is a fork of "
                "it: both would count on the same budget and draw the same noise. Charge in the process "
                "that opened it, or give each process a ledger and a run of its own."
            )

    def check_not_void(self) -> None:
        """Raise if the guarantee no longer holds."""
        if self.state.void is not None:
            raise LedgerError(
                f"{self.title} is void ({self.state.void}): what was charged no longer "
                "covers what was released, so no epsilon can be given. Train a new model on a new "
                "ledger."
            )

    def _read(self, path: Path) -> None:
        try:
            with path.open("rb") as file:
                self.state.read(file)
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    self._write(b"\n")
            if self.state.unexplained:
                self.append(self.state.torn_note())
        except Damaged as damage:
            reason = f" ({damage.reason})" if damage.reason else ""
            raise LedgerError(
                f"{self.title} is damaged at line {damage.number}{reason}: charges may be "
                "missing, so no epsilon can be given. Restore it from a copy, or start a new run on a "
                "new ledger."
            ) from None

    def _write(self, line: bytes) -> None:
        if self._file is None:
            return
        try:
            self._file.append(line)
        except OSError as error:
            self.writable = False
            raise LedgerError(
                f"the charge could not be written to {self.path} ({error}): a step that is not on "
                "record must not be used, so it was not applied. Make room and resume from the last "
                "checkpoint."
            ) from error
