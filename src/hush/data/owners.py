"""Owners of records from a file, where users are protected who have several records each."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError, shorten
from hush.core.value import as_path

_SEPARATORS = (",", ";", "\t", "|")


def read_owners(path: str | os.PathLike[str], records: int) -> NDArray[Any]:
    """Owner of each record, from a text file with one id a line or from a `.npy` array.

    Two records are one user's where their ids are equal, so that what could make the ids of one user
    differ by mistake is refused: a row of a table instead of its column of ids, and an empty line.

    Args:
        path: the file. Blanks around an id do not count.
        records: how many ids there must be, one a record in the records' order.

    Returns:
        Integers or names, as `PrivateStep(units=...)` takes them.
    """
    path = as_path("units", path)
    try:
        owners = _from_npy(path) if path.suffix == ".npy" else _from_lines(path)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror or error}): whose each record is, is not known. "
            "Name a file with one id a line, in the order of the records."
        ) from None
    if owners.shape != (records,):
        raise DataError(
            f"{path} has ids of shape {owners.shape} and there are {records} training records: whose "
            "each record is decides what is clipped together. Write one id a record, in the order of "
            "the records, without a heading."
        )
    return owners


def _from_npy(path: Path) -> NDArray[Any]:
    """The array of a `.npy` file, without pickle."""
    try:
        with path.open("rb") as file:
            return np.lib.format.read_array(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(
            f"{path} is no .npy file of integers or names ({shorten(str(error), 300)}): objects are not "
            "loaded, as reading them could run code. Write it with np.save(path, np.asarray(ids))."
        ) from None


def _from_lines(path: Path) -> NDArray[Any]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte-order mark is no part of the first id
        lines = [line.strip() for line in text.splitlines()]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}): ids are compared as "
            "text. Write one id a line."
        ) from None
    for number, line in enumerate(lines, start=1):
        if not line or any(separator in line for separator in _SEPARATORS):
            kind = "a row of several columns" if line else "empty"
            raise DataError(
                f"{path}, line {number}, is {kind}: records are one user's where their ids are equal, "
                "and whole rows, or none, would split a user into several who are each protected on "
                "their own. Write the column of ids alone, one a line."
            )
    return np.asarray(lines, dtype=np.str_)
