"""Owners of records from a file: one id a record, and nothing that would split a user into several."""

from pathlib import Path

import numpy as np
import pytest

from hush.core.errors import DataError
from hush.data import read_owners
from hush.training.units import UnitTable


def test_a_text_file_and_an_array_give_the_same_units(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("ann\n bob\nann \r\nbob\nann\n", encoding="utf-8")
    np.save(tmp_path / "ids.npy", np.array([7, 9, 7, 9, 7]))
    units = [UnitTable.of(read_owners(tmp_path / name, 5), 2) for name in ("ids.txt", "ids.npy")]
    assert units[0].digest == units[1].digest
    assert units[0].counts.tolist() == [3, 2]


def test_a_byte_order_mark_does_not_split_the_first_user(tmp_path: Path) -> None:
    (tmp_path / "ids.txt").write_text("ann\nbob\nann\n", encoding="utf-8-sig")
    assert read_owners(tmp_path / "ids.txt", 3).tolist() == ["ann", "bob", "ann"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("ann\nbob\n", r"shape \(2,\) and there are 3"),
        ("id\nann\nbob\nann\n", "without a heading"),
        ("ann,1\nbob,2\nann,3\n", "line 1, is a row of several columns"),
        ("ann\nbob\t2\nann\n", "line 2, is a row of several columns"),
        ("ann\nbob\nann|3\n", "line 3, is a row of several columns"),
        ("ann\n\nbob\n", "line 2, is empty"),
        ("", r"shape \(0,\)"),
    ],
)
def test_lines_that_are_not_one_id_a_record_are_refused(tmp_path: Path, content: str, said: str) -> None:
    """A whole row of a table is another one for every record: each would be protected on its own."""
    (tmp_path / "ids.txt").write_text(content)
    with pytest.raises(DataError, match=said):
        read_owners(tmp_path / "ids.txt", 3)


def test_files_that_hold_no_ids_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "objects.npy", np.array([{}, {}, {}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "two.npy", np.zeros((3, 2), dtype=np.int64))
    (tmp_path / "short.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00")
    (tmp_path / "binary.txt").write_bytes(b"ann\n\xff\xfe\n\n")
    for name, said in {
        "objects.npy": "reading them could run code",
        "two.npy": r"shape \(3, 2\)",
        "short.npy": "np.save",
        "binary.txt": "UTF-8",
        "missing.txt": "No such file",
        ".": "cannot be read",
    }.items():
        with pytest.raises(DataError, match=said):
            read_owners(tmp_path / name, 3)
