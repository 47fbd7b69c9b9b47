"""Arrays that are worked out once and kept on disk, found again by what they were made from."""

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError

_SUM_BYTES = 32
_BLOCK = 1 << 26


def cache_directory() -> Path:
    """Where such files go: the environment's HUSH_CACHE, else hush below the user's cache directory."""
    given = os.environ.get("HUSH_CACHE")
    if given:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "hush"


def kept(
    folder: Path,
    name: str,
    source: NDArray[Any],
    shape: tuple[int, ...],
    make: Callable[[], NDArray[np.float32]],
) -> NDArray[np.float32]:
    """The array that `make` gives for `source`, from its file in `folder` if that is whole.

    `name` says how it is made, to the last setting: another name or another source is another file. A
    file of the wrong length, or whose last 32 bytes are not the sha256 of the others, is made anew.
    Files are for their owner's eyes only, as they tell as much as the records.
    """
    content = _digest(f"{source.dtype} {source.shape} ".encode(), source)
    path = folder / f"{name}-{content.hex()[:32]}.f32"
    found = _read(path, shape)
    if found is not None:
        return found
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    print(f"{name}: worked out once for {len(source):,} records, kept in {folder}", file=sys.stderr)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Opened before the work starts: that there is no room to keep it should be known by then.
        with os.fdopen(os.open(draft, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            made = np.ascontiguousarray(make(), dtype="<f4")
            assert made.shape == shape
            made.tofile(file)
            file.write(_sum(made))
        draft.replace(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror}. Features are worked out once and kept; point "
            "the environment variable HUSH_CACHE at a folder with room for "
            f"{4 * np.prod(shape) / 1e9:.1f} GB."
        ) from error
    finally:
        for left in (draft, *_abandoned(path)):
            with suppress(OSError):
                left.unlink()
    return made


def _abandoned(path: Path) -> Iterator[Path]:
    """Drafts of the file by processes that are no more."""
    for draft in path.parent.glob(f"{path.name}.*"):
        process = draft.suffix[1:]
        if process.isdigit() and not Path("/proc", process).exists() and Path("/proc/self").exists():
            yield draft


def _read(path: Path, shape: tuple[int, ...]) -> NDArray[np.float32] | None:
    """What the file holds; None if it is not there or not whole."""
    count = int(np.prod(shape))
    try:
        if path.stat().st_size != 4 * count + _SUM_BYTES:
            return None
        with path.open("rb") as file:
            values = np.fromfile(file, dtype="<f4", count=count)
            return values.reshape(shape) if file.read() == _sum(values) else None
    except OSError:
        return None


def _sum(values: NDArray[np.float32]) -> bytes:
    return _digest(b"", values)


def _digest(kind: bytes, values: NDArray[Any]) -> bytes:
    """The sha256 of the array's bytes, after those of `kind`."""
    found = hashlib.sha256(kind)
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    for begin in range(0, len(flat), _BLOCK):
        found.update(flat[begin : begin + _BLOCK].data)
    return found.digest()
