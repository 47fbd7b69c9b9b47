import os
from pathlib import Path

import pytest

from hush.core import atomic_files
from hush.core.errors import InvalidValue


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


def test_a_folder_is_made_and_left_empty_or_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "some" / "folder"
    atomic_files.check_folder("--out", folder)
    assert not list(folder.iterdir())
    (folder / "file").write_text("")
    with pytest.raises(InvalidValue, match=r"--out=.*/file must be a writable folder .*\(File exists\)"):
        atomic_files.check_folder("--out", folder / "file")
