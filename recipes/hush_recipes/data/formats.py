"""The idx and npz file formats; reading never runs code from a file."""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError

# magic number, sizes, numbers: all big-endian
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


def parse_npz(content: bytes, source: str, names: Sequence[str]) -> list[NDArray[Any]]:
    """The named arrays of an npz file, in the order of `names`, without pickle."""
    try:
        archive = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{source}: not an npz file, or a truncated one ({error}).") from error
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"{source}: a single array; an npz file with {', '.join(names)} is needed.")
    with archive:
        lacking = [name for name in names if name not in archive.files]
        if lacking:
            raise DataError(
                f"{source}: no array named {', '.join(lacking)}; "
                f"it has {', '.join(archive.files) or 'none'}."
            )
        try:
            return [archive[name] for name in names]
        except (ValueError, OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(
                f"{source}: an array is damaged or holds pickled objects, "
                f"which hush does not load ({error})."
            ) from error
