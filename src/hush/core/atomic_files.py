"""Atomic writes: after a crash, a file has either its old or its new content."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from hush.core.errors import InvalidValue


def replace_file(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Replace a file atomically.

    A secret file is readable by its owner only, as is its folder if the folder is new.
    """
    draft = path.with_name(path.name + ".draft")
    with file_named(path, "the previous content is unchanged"):
        if secret and not path.parent.exists():
            path.parent.mkdir(mode=0o700)
            sync_folder(path.parent.parent)
        try:
            mode = 0o600 if secret else 0o666  # less the umask
            with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except BaseException:
            draft.unlink(missing_ok=True)  # free its space on a full disk
            raise
        sync_folder(path.parent)


@contextmanager
def file_named(path: Path, state: str) -> Iterator[None]:
    """Add the file name and the state of the file to an `OSError`."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        text = f"could not be written ({reason}): {state}. Free space or grant permission, then resume"
        raise type(error)(error.errno or 0, text, str(path)) from error


def make_folder(folder: Path) -> None:
    """Create the folder and its parents, and sync their names so they survive a power failure."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync_folder(path.parent)


def check_folder(name: str, folder: Path) -> None:
    """Create the folder passed as option `name`; raise if no file can be written to it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=folder) as file:
            file.write(b"0")
            file.flush()  # raises on a full disk
    except OSError as error:
        text = f"{name}={folder} must be a writable folder ({error.strerror}): results"
        way = f"would be lost. Grant permission, free space, or pass another one, e.g. {name}=results."
        raise InvalidValue(f"{text} {way}", key=name) from error


def sync_folder(folder: Path) -> None:
    """Sync the folder, so new names in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
