"""Figures 2 and 3 of the twice-sampling paper on the bundled digits."""

import csv
from pathlib import Path

import pytest

from hush.data import load
from hush_recipes.figure import Figure
from hush_recipes.twice.geometry import twice_fig2, twice_fig3


def check(figure: Figure, folder: Path) -> dict[str, list[tuple[float, float]]]:
    table, picture = figure.save(folder)
    assert picture.read_bytes().startswith(b"\x89PNG")
    header, *lines = csv.reader(table.read_text().splitlines())
    assert header == ["panel", "x", "value", "deviation"]
    panels: dict[str, list[tuple[float, float]]] = {}
    for name, x, value, _ in lines:
        panels.setdefault(name, []).append((float(x), float(value)))
    for name in ("residual", "sparse residual"):
        values = [value for _, value in panels[name]]
        assert values == sorted(values, reverse=True)
        assert 0 <= values[-1] < values[0] <= 1 + 1e-6
    return panels


def test_figure_2_says_that_its_data_are_others(tmp_path: Path) -> None:
    figure = twice_fig2(data="digits", records=100)
    panels = check(figure, tmp_path)
    assert "other data than the paper's" in figure.notes[0]
    # the mean of the largest pixel over the length, worked out directly
    images = load("digits").x_train[100:200].reshape(100, -1).astype(float)
    largest = sorted(abs(image).max() / (image @ image) ** 0.5 for image in images)
    assert panels["largest entry"][0][1] == pytest.approx(largest[0], rel=1e-5)
    assert panels["largest entry"][-1][1] == pytest.approx(largest[-1], rel=1e-5)


def test_figure_3_measures_the_network_asked_for(tmp_path: Path) -> None:
    figure = twice_fig3(model="logistic", data="digits", records=60, steps=3)
    assert "gradients of logistic on digits: 60 + 60 records, 650 parameters" in figure.title
    panels = check(figure, tmp_path)
    assert panels["residual"][-1][0] == 60
    assert max(value for _, value in panels["principal"]) <= 1 + 1e-6
