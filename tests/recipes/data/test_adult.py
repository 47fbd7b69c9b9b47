import math

import numpy as np
import pytest

from hush.core.errors import DataError
from hush_recipes.data.adult import COLUMNS, Categories, parse_adult

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


def test_the_weight_column_is_not_used() -> None:
    x, _ = parse_adult(ROW.encode(), "file")
    assert np.array_equal(x, parse_adult(changed(2, "1"), "file")[0])


def test_every_category_has_its_own_feature() -> None:
    columns = set()
    for column, meaning in enumerate(COLUMNS):
        if isinstance(meaning, Categories):
            without = parse_adult(changed(column, "?"), "file")[0][0]
            for value in meaning.values:
                extra = parse_adult(changed(column, value), "file")[0][0] - without
                assert np.sort(extra).tolist() == [0] * 103 + [1]
                columns.add(int(extra.argmax()))
    assert len(columns) == 99


def test_numbers_beyond_the_public_limit_are_cut_to_it() -> None:
    assert parse_adult(changed(0, "250"), "file")[0][0, 0] == 1
    assert parse_adult(changed(12, "-3"), "file")[0][0, 62] == 0


def test_the_test_file_has_a_comment_and_full_stops() -> None:
    content = f"|1x3 Cross validator\n{ROW}.\n{ROW.replace('<=', '>')}.\n\n".encode()
    x, y = parse_adult(content, "file")
    assert len(x) == 2
    assert y.tolist() == [0, 1]


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
