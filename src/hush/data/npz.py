"""The npz format, without pickle: reading data must never run code from the file."""

import io
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError


def parse_npz(content: bytes, source: str, names: Sequence[str]) -> list[NDArray[Any]]:
    """The named arrays of an npz file, in the order of `names`."""
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
