import math

import numpy as np
import pytest

from hush.core.errors import DataError
from hush_recipes.data.adult import parse_adult

ROW = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, "
    "Male, 2174, 0, 40, United-States, <=50K"
)


def changed(column: int, value: str) -> bytes:
    cells = ROW.split(", ")
    cells[column] = value
    return ", ".join(cells).encode()


def test_a_row_becomes_104_numbers() -> None:
    x, y = parse_adult(ROW.encode(), "file")
    assert x.shape == (1, 104)
    assert x.dtype == np.float32
    assert y.dtype == np.int64
    assert x[0, 0] == pytest.approx(0.39)
    gain, loss, hours = x[0, 60:63]
    assert gain == pytest.approx(math.log(2175) / math.log(100_000))
    assert loss == 0
    assert hours == pytest.approx(40 / 99)
    assert y.tolist() == [0]


def test_numbers_beyond_the_public_limit_are_cut_to_it() -> None:
    assert parse_adult(changed(0, "250"), "file")[0][0, 0] == 1
    assert parse_adult(changed(12, "-3"), "file")[0][0, 62] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ROW.encode()[:-20], "line 1: 14 columns, not 15"),
        (f"{ROW}\n39, Private".encode(), "line 2: 2 columns"),
        (changed(0, "old"), "age is 'old', which is not a number"),
        (changed(0, "nan"), "age is 'nan'"),
        (changed(4, "?"), r"education-num is '\?'"),
        (changed(1, "Pirate"), "workclass is 'Pirate'; it can be Private, "),
        (changed(14, "50K"), "label '50K' is neither <=50K nor >50K"),
        (b"|only a comment\n\n", "no rows"),
        (b"\xff\xfe", "not a text file"),
    ],
)
def test_damage_is_named(content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=f"^file.*{message}"):
        parse_adult(content, "file")
