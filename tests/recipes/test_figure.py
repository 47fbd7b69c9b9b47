"""Tables as text; the files of a figure."""

import csv
from pathlib import Path

from hush_recipes.figure import Figure


def test_a_figure_leaves_a_table_and_a_picture(tmp_path: Path) -> None:
    figure = Figure(
        name="x",
        title="a line",
        header=["a", "b"],
        rows=[[1, 0.123456], ["best", None]],
        draw=lambda axes: axes.plot([0, 1], [0, 1]),
    )
    table, picture = figure.save(tmp_path / "new")
    assert list(csv.reader(table.read_text().splitlines())) == [
        ["a", "b"],
        ["1", "0.123456"],
        ["best", ""],
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "| 1    | 0.1235 |" in figure.table().markdown()
