import os
from pathlib import Path

import pytest

from hush.core import atomic_files


def test_the_new_content_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "file"
    atomic_files.replace_file(path, b"old")
    atomic_files.replace_file(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_while_writing_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    atomic_files.replace_file(path, b"old")

    def crash(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="no space"):
        atomic_files.replace_file(path, b"new")
    assert path.read_bytes() == b"old"
