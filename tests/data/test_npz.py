import io
from typing import Any

import numpy as np
import pytest

from hush.core.errors import DataError
from hush.data.npz import parse_npz


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def test_arrays_come_in_the_order_asked_for() -> None:
    x, y = parse_npz(npz(y=np.arange(2), x=np.eye(3), z=np.zeros(1)), "file", ("x", "y"))
    assert x.shape == (3, 3)
    assert y.tolist() == [0, 1]


def test_a_missing_array_is_named_with_those_there_are() -> None:
    with pytest.raises(DataError, match=r"file: no array named x, y; it has a, b\."):
        parse_npz(npz(a=np.zeros(1), b=np.zeros(1)), "file", ("x", "y"))


def test_pickled_objects_are_not_loaded() -> None:
    with pytest.raises(DataError, match="pickled objects"):
        parse_npz(npz(x=np.array([{"a": 1}], dtype=object)), "file", ("x",))


@pytest.mark.parametrize("keep", [0, 10, 100, -30])
def test_a_truncated_file_is_refused(keep: int) -> None:
    with pytest.raises(DataError, match="truncated"):
        parse_npz(npz(x=np.arange(100))[:keep], "file", ("x",))


def test_a_changed_byte_is_noticed() -> None:
    content = bytearray(npz(x=np.arange(100)))
    content[300] ^= 1
    with pytest.raises(DataError, match="damaged"):
        parse_npz(bytes(content), "file", ("x",))


def test_a_single_array_is_refused() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    with pytest.raises(DataError, match="a single array"):
        parse_npz(buffer.getvalue(), "file", ("x",))


def test_a_pickle_is_refused() -> None:
    with pytest.raises(DataError, match="not an npz file"):
        parse_npz(b"\x80\x04K\x01.", "file", ("x",))
