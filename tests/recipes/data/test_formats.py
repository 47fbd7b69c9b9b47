"""The idx and npz readers: every type comes back, damage is named."""

import io
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hush.core.errors import DataError
from hush_recipes.data.formats import parse_idx, parse_npz

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx(array: NDArray[np.generic]) -> bytes:
    kind = array.dtype.str[1:]
    header = struct.pack(f">HBB{array.ndim}I", 0, CODES[kind], array.ndim, *array.shape)
    return header + array.astype(">" + kind).tobytes()


@pytest.mark.parametrize("kind", list(CODES))
def test_every_type_comes_back(kind: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(kind)
    read = parse_idx(idx(array), "file")
    assert read.dtype == array.dtype
    assert np.array_equal(read, array)
    assert read.flags.writeable, "torch.from_numpy warns about read-only memory"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "truncated: sizes 2 x 3 need 18 bytes, and there are 17"),
        (lambda content: content + b"x", "too long"),
        (lambda content: content[:9], "truncated: the header needs 12 bytes"),
        (lambda content: content[:3], "too few"),
        (lambda content: b"", "too few"),
        (lambda content: b"\x1f\x8b" + content[2:], "not an idx file: it begins with 1f 8b"),
        (lambda content: b"\0\0\x0a" + content[3:], "not an idx file"),
        (lambda content: b"\0\0\x08\0" + content[4:], "not an idx file"),
    ],
)
def test_damage_is_named(damage: Callable[[bytes], bytes], message: str) -> None:
    content = damage(idx(np.arange(6, dtype=np.uint8).reshape(2, 3)))
    with pytest.raises(DataError, match=f"^some/file: .*{message}"):
        parse_idx(content, "some/file")


def npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def test_arrays_come_in_the_order_asked_for() -> None:
    x, y = parse_npz(npz(y=np.arange(2), x=np.eye(3), z=np.zeros(1)), "file", ("x", "y"))
    assert x.shape == (3, 3)
    assert y.tolist() == [0, 1]
