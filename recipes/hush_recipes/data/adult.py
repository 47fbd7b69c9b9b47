"""The Adult census table: its columns, as adult.names lists them, and its reader.

Limits are round numbers or the census' own codes (99 hours, 16 levels of education, 99,999
dollars), so that scaling reads nothing off the records.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hush.core.errors import DataError
from hush.data import Dataset
from hush_recipes.data.published import find_directory, read_published


@dataclass(frozen=True)
class Measure:
    """A number that is at most `limit`, on a logarithmic scale where it spans decades."""

    name: str
    limit: float
    logarithm: bool = False


@dataclass(frozen=True)
class Categories:
    """One of a public list of values."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True)
class Dropped:
    """A column that is not used."""

    name: str


def _categories(name: str, values: str) -> Categories:
    return Categories(name, tuple(values.split()))


UNKNOWN = "?"
LABELS = ("<=50K", ">50K")

COLUMNS: tuple[Measure | Categories | Dropped, ...] = (
    Measure("age", 100),
    _categories(
        "workclass",
        "Private Self-emp-not-inc Self-emp-inc Federal-gov Local-gov State-gov Without-pay Never-worked",
    ),
    # How many people the census thinks a row stands for: tells nothing about the person.
    Dropped("fnlwgt"),
    _categories(
        "education",
        "Bachelors Some-college 11th HS-grad Prof-school Assoc-acdm Assoc-voc 9th 7th-8th 12th "
        "Masters 1st-4th 10th Doctorate 5th-6th Preschool",
    ),
    Measure("education-num", 16),
    _categories(
        "marital-status",
        "Married-civ-spouse Divorced Never-married Separated Widowed Married-spouse-absent "
        "Married-AF-spouse",
    ),
    _categories(
        "occupation",
        "Tech-support Craft-repair Other-service Sales Exec-managerial Prof-specialty "
        "Handlers-cleaners Machine-op-inspct Adm-clerical Farming-fishing Transport-moving "
        "Priv-house-serv Protective-serv Armed-Forces",
    ),
    _categories("relationship", "Wife Own-child Husband Not-in-family Other-relative Unmarried"),
    _categories("race", "White Asian-Pac-Islander Amer-Indian-Eskimo Other Black"),
    _categories("sex", "Female Male"),
    Measure("capital-gain", 99_999, logarithm=True),
    Measure("capital-loss", 99_999, logarithm=True),
    Measure("hours-per-week", 99),
    _categories(
        "native-country",
        "United-States Cambodia England Puerto-Rico Canada Germany Outlying-US(Guam-USVI-etc) "
        "India Japan Greece South China Cuba Iran Honduras Philippines Italy Poland Jamaica "
        "Vietnam Mexico Portugal Ireland France Dominican-Republic Laos Ecuador Taiwan Haiti "
        "Columbia Hungary Guatemala Nicaragua Scotland Thailand Yugoslavia El-Salvador "
        "Trinadad&Tobago Peru Hong Holand-Netherlands",
    ),
)


def read_adult(directory: str | Path | None = None) -> Dataset:
    """32,561 training and 16,281 test rows of 104 features in [0, 1]; label 1 earns over 50K."""
    train, test = read_published("adult", find_directory("adult", directory))
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
