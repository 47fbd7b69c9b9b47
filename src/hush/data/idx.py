"""The idx format: a magic number, the sizes, then the numbers, all big-endian."""

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError
from hush.data.dataset import Dataset, unit_pixels
from hush.data.files import read_published
from hush.data.published import FILES

_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def parse_idx(content: bytes, source: str) -> NDArray[Any]:
    """The array that an idx file holds, in the machine's own byte order."""
    if len(content) < 4:
        raise DataError(f"{source}: {len(content)} bytes are too few for an idx file.")
    zero, code, dimensions = struct.unpack_from(">HBB", content)
    if zero != 0 or code not in _TYPES or dimensions == 0:
        raise DataError(
            f"{source}: not an idx file: it begins with {content[:4].hex(' ')}, where an idx file "
            f"has 00 00, a type among {', '.join(f'{code:02x}' for code in _TYPES)}, and the "
            "number of dimensions."
        )
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(f"{source}: truncated: the header needs {header} bytes, not {len(content)}.")
    shape = struct.unpack_from(f">{dimensions}I", content, 4)
    dtype = np.dtype(_TYPES[code])
    expected = header + math.prod(shape) * dtype.itemsize
    if len(content) != expected:
        fault = "truncated" if len(content) < expected else "too long"
        raise DataError(
            f"{source}: {fault}: sizes {' x '.join(map(str, shape))} need {expected} bytes, "
            f"and there are {len(content)}."
        )
    numbers = np.frombuffer(content, dtype, offset=header).reshape(shape)
    return numbers.astype(dtype.newbyteorder("="))


def read_mnist(name: str, folder: Path) -> Dataset:
    """The data set `name` (mnist or fashion-mnist): images N x 1 x 28 x 28 in [0, 1]."""
    x_train, y_train, x_test, y_test = (
        parse_idx(content, f"{name}: {folder / file.path}")
        for content, file in zip(read_published(name, folder), FILES[name], strict=True)
    )
    return Dataset(
        name=name,
        x_train=unit_pixels(x_train)[:, np.newaxis],
        y_train=y_train.astype(np.int64),
        x_test=unit_pixels(x_test)[:, np.newaxis],
        y_test=y_test.astype(np.int64),
        classes=10,
    )
