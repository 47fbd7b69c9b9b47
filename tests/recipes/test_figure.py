"""Tables as text; the files of a figure."""

import csv
from collections.abc import Sequence
from pathlib import Path

import pytest
from matplotlib.figure import Figure as Canvas

from hush_recipes.figure import Figure, label_lines


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


@pytest.mark.parametrize(
    ("ends", "labelled"),
    [((0.1, 0.5, 0.9), True), ((0.5, 0.5, 0.5, 0.5), False), (tuple(n / 6 for n in range(6)), False)],
    ids=["apart", "at one place", "too many"],
)
def test_few_lines_with_ends_apart_are_labelled_there(ends: Sequence[float], labelled: bool) -> None:
    axes = Canvas().subplots()
    for end in ends:
        axes.plot([0, 1], [0, end], label=f"to {end:g}")
    axes.set(ylim=(0, 1))
    axes.legend()
    label_lines(axes)
    assert (axes.get_legend() is None) is labelled
    assert [text.get_text() for text in axes.texts] == (
        [f"to {end:g}" for end in ends] if labelled else []
    )
