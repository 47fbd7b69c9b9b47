"""Public schemas: each record encoded by itself; what is not declared is refused without being shown."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hush.core.errors import DataError, InvalidValue
from hush.schema import Categorical, Encoded, Ignored, Image, Numeric, encode, read_schema, schema_text

SCHEMA = {
    "age": Numeric(low=0, high=100),
    "colour": Categorical(values=("red", "green", "blue")),
    "gain": Numeric(low=0, high=1e5, log=True),
}


def frame(**changed: Any) -> Any:
    columns = {
        "age": [0.0, 50.0, 100.0, 30.0],
        "colour": ["red", "blue", "red", "green"],
        "gain": [0.0, 10.0, 1e5, 5e3],
    }
    return pandas.DataFrame({**columns, **changed})


def together(encoded: Encoded) -> np.ndarray:
    return np.hstack([encoded.numeric, encoded.categorical])


def test_columns_are_scaled_by_their_bounds_and_one_hot() -> None:
    encoded = encode(frame(), SCHEMA)
    assert encoded.numeric[:, 0] == pytest.approx([-1, 0, 1, -0.4])
    assert encoded.numeric[:, 1] == pytest.approx(
        [2 * math.log1p(v) / math.log1p(1e5) - 1 for v in (0, 10, 1e5, 5e3)]
    )
    assert encoded.categorical.tolist() == [[1, 0, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]]
    assert encoded.categories == 1


def test_columns_are_found_by_name_or_by_place() -> None:
    by_name = together(encode(frame(), SCHEMA))
    assert np.array_equal(together(encode(frame()[["gain", "age", "colour"]], SCHEMA)), by_name)
    cells = np.array([frame()[name] for name in SCHEMA], dtype=object).T
    assert np.array_equal(together(encode(cells, SCHEMA)), by_name)
    assert np.array_equal(together(encode(cells, list(SCHEMA.values()))), by_name)
    assert encode(np.zeros((2, 5)), Numeric(low=0, high=1)).numeric.tolist() == [[-1] * 5] * 2


@given(
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(("red", "green", "blue")),
    st.floats(allow_nan=False, allow_infinity=False),
)
def test_a_record_changes_its_own_row_alone_and_stays_within_bounds(
    age: float, colour: str, gain: float
) -> None:
    usual = encode(frame(), SCHEMA)
    other = encode(
        frame(age=[0, 50, 100, age], colour=["red", "blue", "red", colour], gain=[0, 10, 1e5, gain]),
        SCHEMA,
    )
    assert np.array_equal(together(usual)[:3], together(other)[:3])
    assert np.abs(together(other)).max() <= 1
    assert (other.categorical.sum(1) == 1).all()


@given(st.floats(-1e3, 1e3), st.booleans())
def test_unscaling_is_the_way_back_within_the_bounds(value: float, log: bool) -> None:
    target = Numeric(low=-20, high=500, log=log)
    back = target.unscale(target.scale(np.array([value])))
    assert back == pytest.approx([min(max(value, -20), 500)], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("age", [math.nan, math.inf, "ancient"])
def test_what_is_no_number_is_refused_without_being_shown(age: Any) -> None:
    with pytest.raises(DataError, match=r"column 'age' (contains infinity|has missing)") as refused:
        encode(frame(age=np.array([age, 1.0, 2.0, 3.0], dtype=object)), SCHEMA)
    assert "ancient" not in str(refused.value)


@pytest.mark.parametrize("table", [["ancient", "1"], [["ancient"], ["1"]]], ids=str)
def test_no_message_of_another_library_shows_a_value(table: Any) -> None:
    for cells in (table, np.array(table), np.array(table, dtype=object)):
        with pytest.raises(DataError) as refused:
            encode(cells, Numeric(low=0, high=1))
        assert "ancient" not in str(refused.value)
        assert refused.value.__cause__ is None


@pytest.mark.parametrize("colour", ["ultraviolet", None, math.nan, ["red"]])
def test_a_category_outside_the_schema_is_refused_without_being_shown(colour: Any) -> None:
    colours = np.empty(4, dtype=object)
    colours[:] = ["red", "red", "red", colour]
    with pytest.raises(DataError, match=r"column 'colour' .* that is not declared") as refused:
        encode(frame(colour=colours), SCHEMA)
    assert "ultraviolet" not in str(refused.value)


def test_columns_outside_the_schema_and_missing_ones_are_refused() -> None:
    with pytest.raises(DataError, match=r"columns \['weight'\] outside the schema"):
        encode(frame(weight=[1, 2, 3, 4]), SCHEMA)
    with pytest.raises(DataError, match=r"X lacks columns \['age'\] of the schema"):
        encode(frame()[["colour", "gain"]], SCHEMA)
    with pytest.raises(DataError, match="X has 2 columns and the schema declares 3"):
        encode(np.zeros((4, 2)), [Numeric(low=0, high=1)] * 3)


@pytest.mark.parametrize("schema", [None, {}, [], "age", {"age": (0, 100)}, 3])
def test_a_schema_declares_every_column(schema: Any) -> None:
    with pytest.raises(InvalidValue, match="must declare every column"):
        encode(np.zeros((4, 1)), schema)


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (0, math.inf), (math.nan, 1), ("0", 1)])
def test_bounds_are_two_numbers(low: Any, high: Any) -> None:
    with pytest.raises(InvalidValue, match=r"low|high"):
        Numeric(low=low, high=high)


@pytest.mark.parametrize("values", [(), ("a",), ("a", "a"), "ab", None, 3, [["a"], ["b"]]])
def test_categories_are_a_list_of_different_values(values: Any) -> None:
    with pytest.raises(InvalidValue, match="at least two different values"):
        Categorical(values=values)


MISSING = [None, math.nan, pandas.NA, pandas.NaT, "", " ", "NA", "?", "null"]


@pytest.mark.parametrize("cell", MISSING, ids=repr)
def test_a_missing_value_has_a_public_encoding_or_is_named(cell: Any) -> None:
    values = np.empty(3, object)
    values[:] = [25.0, cell, "100"]
    encoded = Numeric(low=0, high=100, missing=50).encode("age", values)
    assert encoded.tolist() == [[-0.5, 0], [0, 1], [1, 0]]
    with pytest.raises(DataError, match=r"missing values .* Declare Numeric\(missing=NUMBER\)"):
        Numeric(low=0, high=100).encode("age", values)
    values[:] = ["red", cell, "blue"]
    colours = ("red", "blue", "other")
    for column in (
        Categorical(values=colours, missing="other"),
        Categorical(values=colours, unseen="other"),
        Categorical(values=colours, unseen="red", missing="other"),
    ):
        assert column.encode("colour", values).argmax(1).tolist() == [0, 2, 1]
    with pytest.raises(DataError, match=r"lacks a value \(missing\) .* Categorical\(missing=\)"):
        Categorical(values=colours).encode("colour", values)


def test_an_undeclared_category_takes_the_place_of_unseen() -> None:
    column = Categorical(values=(1, 2, "other"), unseen="other")
    cells = np.array(["1", 2, " 2 ", "7", 7], object)
    assert column.encode("size", cells).argmax(1).tolist() == [0, 1, 1, 2, 2]
    with pytest.raises(InvalidValue, match="unseen='none' must be one of the declared values"):
        Categorical(values=(1, 2), unseen="none")


def test_a_text_of_a_missing_value_may_be_declared() -> None:
    column = Categorical(values=("NA", "EU"), missing="EU")
    assert column.encode("region", np.array(["NA", "", "EU"], object)).argmax(1).tolist() == [0, 1, 1]


def test_a_schema_is_written_and_read(tmp_path: Path) -> None:
    schema = {
        **SCHEMA,
        'odd "name".x': Numeric(low=-1, high=1, missing=0),
        "shape": Categorical(values=("a\nb", "é", 3, "other"), unseen="other", missing="é"),
        "picture": Image(height=8, width=9, channels=1),
        "id": Ignored(),
    }
    path = tmp_path / "schema.toml"
    path.write_text(schema_text(schema), encoding="utf-8")
    assert read_schema(path) == {name: replace(column) for name, column in schema.items()}
    assert list(read_schema(path)) == list(schema)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "declares no column"),
        ("[age", "cannot be read"),
        ("[age]\nlow = 0", "column 'age' needs a kind: Numeric, Categorical, Image, Ignored"),
        ('[age]\nkind = "Numeric"\nlow = 0', "column 'age': 'high' of Numeric is missing"),
        ('[job]\nkind = "Categorical"\nvalues = ["a"]', "column 'job': values=.*two different values"),
        ('[age]\nkind = "Numeric"\nlow = 0\nhigh = 1\nlogg = true', "'logg' is not an argument"),
    ],
)
def test_a_schema_file_that_is_wrong_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "schema.toml"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=said) as refused:
        read_schema(path)
    assert str(path) in str(refused.value)


def test_ignored_columns_of_a_data_frame_have_no_feature() -> None:
    with_id = {**SCHEMA, "id": Ignored()}
    assert np.array_equal(
        together(encode(frame(id=["x", None, "y", "z"]), with_id)), together(encode(frame(), SCHEMA))
    )


def test_the_schema_of_the_page_is_a_schema(tmp_path: Path) -> None:
    page = Path(__file__).parents[1] / "docs" / "own-data.md"
    (tmp_path / "schema.toml").write_text(page.read_text().split("```toml\n")[1].split("```")[0])
    schema = read_schema(tmp_path / "schema.toml")
    assert schema["age"] == Numeric(low=0, high=100, missing=40)
    assert {type(column) for column in schema.values()} == {Numeric, Categorical, Ignored}
