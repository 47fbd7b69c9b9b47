"""What a run of PATE leaves on disk, and in which file."""

import json
from pathlib import Path
from typing import Any

from hush.core.atomic_files import replace_file
from hush.core.errors import CheckpointError, LedgerError


class PateFolder:
    """The files of one run.

    `settings.json`, `ledger.jsonl` (with the answers) and `student.safetensors` may be published;
    `teachers/` and `private.json` are as secret as the records: how many records there are tells
    neighbours apart that differ by one.
    """

    def __init__(
        self, path: Path, settings: dict[str, Any], private: dict[str, Any], *, resume: bool
    ) -> None:
        self.path = path
        self.ledger = path / "ledger.jsonl"
        self.teachers = path / "teachers"
        self.student = path / "student.safetensors"
        self._settings = path / "settings.json"
        self._private = path / "private.json"
        self._contents = {
            self._private: json.dumps(private, indent=1),
            self._settings: json.dumps(settings, indent=1),
        }
        if resume and not self._settings.is_file():
            raise CheckpointError(
                f"there is no run in {path} to resume: starting one under a mistyped name would pay for "
                "everything again. Check the name, or start the run without resuming."
            )
        if self._settings.exists():
            self._check(resume=resume)
        elif self.teachers.exists():
            raise CheckpointError(
                f"{path} holds teachers without settings.json: trained on other shares of the records, "
                "two of them may have seen the same one. Restore the file, or name another directory."
            )

    def begin(self) -> None:
        """Say that a run exists; its ledger must be there already."""
        for path, content in self._contents.items():
            replace_file(path, content.encode(), secret=path == self._private)

    def _check(self, *, resume: bool) -> None:
        """Raise unless the run that is there may go on with these settings."""
        if not resume:
            raise CheckpointError(
                f"{self.path} already holds a run: starting over would spend its budget a second time "
                "without saying so. Resume it, or name another directory."
            )
        differing = []
        for path, content in self._contents.items():
            try:
                before, now = json.loads(path.read_bytes()), json.loads(content)
            except (ValueError, OSError) as error:
                raise CheckpointError(
                    f"{path} is damaged or missing ({error}): what the ledger was charged for is not "
                    "known. Restore it, or start a new run in a new directory."
                ) from None
            known = before if isinstance(before, dict) else {}
            differing += [name for name in now if known.get(name) != now[name]]
        if differing:
            raise CheckpointError(
                f"{self.path} holds a run with other settings ({', '.join(differing)}): a run keeps "
                "what it was charged for. Resume with the same ones, or name another directory."
            )
        if not self.ledger.exists():
            raise LedgerError(
                f"{self.path} holds a run whose ledger is missing: what it spent is not known. Restore "
                "ledger.jsonl, or start a new run in a new directory."
            )
