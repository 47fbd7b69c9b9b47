"""The Adult census table: does a person earn more than 50,000 dollars a year?"""

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError
from hush.data.adult_columns import COLUMNS, LABELS, UNKNOWN, Categories, Measure
from hush.data.dataset import Dataset
from hush.data.files import read_published


def read_adult(folder: Path) -> Dataset:
    """32,561 training and 16,281 test rows of 104 features in [0, 1]; label 1 earns over 50K."""
    train, test = read_published("adult", folder)
    x_train, y_train = parse_adult(train, "adult: adult.data")
    x_test, y_test = parse_adult(test, "adult: adult.test")
    return Dataset(
        name="adult", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test, classes=2
    )


def parse_adult(content: bytes, source: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Features and labels of one of the two files, a row a person."""
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise DataError(f"{source}: not a text file ({error}).") from error
    rows, labels = [], []
    for number, line in enumerate(lines, start=1):
        # The test file begins with a comment; both files end with an empty line.
        if line.strip() and not line.startswith("|"):
            features, label = _row(line, f"{source}, line {number}")
            rows.append(features)
            labels.append(label)
    if not rows:
        raise DataError(f"{source}: no rows.")
    return np.array(rows, dtype=np.float32), np.array(labels, dtype=np.int64)


def _row(line: str, source: str) -> tuple[list[float], int]:
    cells = [cell.strip() for cell in line.split(",")]
    if len(cells) != len(COLUMNS) + 1:
        raise DataError(
            f"{source}: {len(cells)} columns, not {len(COLUMNS) + 1}: the row is truncated or "
            "not one of this table."
        )
    features: list[float] = []
    for column, cell in zip(COLUMNS, cells[:-1], strict=True):
        if isinstance(column, Measure):
            features.append(_measured(column, cell, source))
        elif isinstance(column, Categories):
            features.extend(_one_hot(column, cell, source))
    # In the test file, and only there, labels end in a full stop.
    label = cells[-1].removesuffix(".")
    if label not in LABELS:
        raise DataError(f"{source}: the label {cells[-1]!r} is neither {' nor '.join(LABELS)}.")
    return features, LABELS.index(label)


def _measured(column: Measure, cell: str, source: str) -> float:
    """The number in units of the column's public limit, cut to [0, 1]."""
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise DataError(f"{source}: {column.name} is {cell!r}, which is not a number.")
    number = min(max(number, 0.0), column.limit)
    if column.logarithm:
        return math.log1p(number) / math.log1p(column.limit)
    return number / column.limit


def _one_hot(column: Categories, cell: str, source: str) -> list[float]:
    """1.0 at the category; nothing but zeros for an unknown one."""
    if cell != UNKNOWN and cell not in column.values:
        raise DataError(
            f"{source}: {column.name} is {cell!r}; it can be {', '.join(column.values)} or {UNKNOWN}."
        )
    return [float(cell == value) for value in column.values]
