"""Finding published files and checking that they are what was published."""

import gzip
import hashlib
import os
import zlib
from pathlib import Path

from hush.core.errors import DataError
from hush.data.published import FILES, Published


def find_directory(name: str, directory: str | Path | None) -> Path:
    """The data directory: the argument, else the environment variable HUSH_DATA."""
    given = directory or os.environ.get("HUSH_DATA")
    if not given:
        raise DataError(
            f"{name}: no data directory is given. {placement(name, Path('DATA'))}\n"
            "hush downloads nothing; the data set digits needs no files."
        )
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise DataError(f"{name}: the data directory {folder} is not there. {placement(name, folder)}")
    return folder


def read_published(name: str, folder: Path) -> list[bytes]:
    """The checked, unpacked contents of the data set's files, in the order of the table."""
    return [_checked(name, folder, file) for file in FILES[name]]


def placement(name: str, folder: Path) -> str:
    """Which files to put where, and how to point at them."""
    paths = [
        f"  {folder / file.path}" + (", or unpacked, without .gz" if file.unpacked else "")
        for file in FILES[name]
    ]
    if name == "cifar10":
        paths = [
            f"  {folder / 'cifar10' / 'cifar10.npz'} (uint8 x_train, y_train, x_test, y_test; "
            "images N x 32 x 32 x 3)",
            "or the compact copy",
            *paths,
        ]
    return "\n".join(
        [
            "Put the published files, unchanged, here:",
            *paths,
            f"and point at {folder} with HUSH_DATA in the environment (hush train: or --data-dir).",
        ]
    )


def read_bytes(name: str, path: Path) -> bytes:
    """The bytes of one file of the data set."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{name}: {path} cannot be read: {error.strerror}.") from error


def check_sum(name: str, what: str | Path, content: bytes, expected: str, folder: Path) -> None:
    """Raise unless the content is the published one, to the last bit."""
    found = hashlib.sha256(content).hexdigest()
    if found != expected:
        raise DataError(
            f"{name}: {what} is damaged or not the published one: its sha256 is {found}, "
            f"the published one {expected}. {placement(name, folder)}"
        )


def _checked(name: str, folder: Path, file: Published) -> bytes:
    packed = folder / file.path
    if packed.is_file():
        content = read_bytes(name, packed)
        check_sum(name, packed, content, file.sha256, folder)
        return _gunzipped(name, packed, content) if file.unpacked else content
    bare = packed.with_suffix("")
    if file.unpacked and bare.is_file():
        content = read_bytes(name, bare)
        check_sum(name, bare, content, file.unpacked, folder)
        return content
    raise DataError(f"{name}: {packed} is not there. {placement(name, folder)}")


def _gunzipped(name: str, path: Path, content: bytes) -> bytes:
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{name}: {path} cannot be unpacked: {error}.") from error
