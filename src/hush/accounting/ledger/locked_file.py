"""Append-only file with an exclusive lock, created and replaced atomically."""

import fcntl
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from weakref import WeakSet

from hush.core.atomic_files import file_named, make_folder, sync_folder
from hush.core.errors import LedgerError

_FLAGS = os.O_RDWR | os.O_APPEND


_open_files: "WeakSet[LockedFile]" = WeakSet()


class LockedFile:
    """An append-only file that this process alone may write to.

    It is created and replaced under another name and then renamed, so that no crash leaves an empty
    or a half-written one. The new file is locked before it gets the name: whoever opens that name
    finds it taken, and whoever had opened the old file finds that it lost the name.
    """

    _close_handle = staticmethod(os.close)  # when Python ends, this module loses `os` before its objects

    def __init__(self, path: Path, beginning: bytes) -> None:
        """Open and lock the file at `path`; one that is not there is made to hold `beginning`."""
        self.path = path = path.resolve()  # a new file takes the place of the file, not of a link to it
        make_folder(path.parent)
        self._handle = -1
        while self._handle < 0:
            try:
                self._handle = _locked(path, path)
            except FileNotFoundError:
                self._create(beginning)
        _open_files.add(self)

    def append(self, line: bytes) -> None:
        """Put the line on disk; it is synced when this returns."""
        written = os.write(self._handle, line)
        os.fsync(self._handle)
        if written < len(line):
            raise OSError(f"only {written} of {len(line)} bytes were written")

    def replace(self, lines: Iterable[bytes]) -> None:
        """Put other lines in place of the file's, in one step that a crash cannot split."""
        # a name of its own: only the owner of the file's lock comes here
        draft = self.path.with_name(self.path.name + ".compact")
        with file_named(self.path, "no charge was lost"):
            handle = _locked(draft, self.path, os.O_CREAT)
            os.fchmod(handle, stat.S_IMODE(os.fstat(self._handle).st_mode))
            self._rename(handle, draft, b"".join(lines))
            os.close(self._handle)
            self._handle = handle
            sync_folder(self.path.parent)

    def close(self) -> None:
        """Release the file and its lock."""
        if self._handle >= 0:
            self._close_handle(self._handle)
            self._handle = -1

    def _create(self, beginning: bytes) -> None:
        """Make the file, unless somebody else does so first."""
        draft = self.path.with_name(self.path.name + ".draft")
        with file_named(self.path, "no charge was lost"):
            handle = _locked(draft, self.path, os.O_CREAT)
            if self.path.exists():  # another process made it and let go of the draft
                os.unlink(draft)
                os.close(handle)
                return
            self._rename(handle, draft, beginning)
            self._handle = handle
            sync_folder(self.path.parent)

    def _rename(self, handle: int, draft: Path, content: bytes) -> None:
        """Fill the locked draft and give it the file's name; a failure leaves neither behind."""
        try:
            os.ftruncate(handle, 0)
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(handle, rest) :]
            os.fsync(handle)
            draft.replace(self.path)
        except BaseException:
            draft.unlink(missing_ok=True)
            os.close(handle)
            raise


def _close_in_fork() -> None:
    """Close the files of a forked process, which may not write them.

    A lock is held until no process has the file open: workers that read data would keep it after the
    process that charges has closed its ledger, or was killed.
    """
    for file in list(_open_files):
        file.close()


os.register_at_fork(after_in_child=_close_in_fork)


def _locked(path: Path, ledger: Path, create: int = 0) -> int:
    """A locked handle of the file that has the name `path`; `ledger` is the name in errors."""
    while True:
        handle = os.open(path, _FLAGS | create, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _has_name(handle, path):
                return handle
        except BlockingIOError:
            os.close(handle)
            raise LedgerError(
                f"the ledger {ledger} is open already, in this process or in another: two writers could "
                "each spend the same budget. Close it there (step.ledger.close() where a PrivateStep "
                "opened it), or wait for the other process to end."
            ) from None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # replaced between opening and locking


def _has_name(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False
