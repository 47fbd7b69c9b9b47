"""Files that survive a crash: either the old content or the new, never half of one."""

import os
from pathlib import Path


def replace_file(path: Path, content: bytes, *, secret: bool = False) -> None:
    """Put `content` at `path` in one step that a crash cannot split; `secret`: for its owner alone."""
    draft = path.with_name(path.name + ".draft")
    with open(draft, "wb", opener=_for_owner if secret else None) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def _for_owner(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
    """Make a new name in the folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
