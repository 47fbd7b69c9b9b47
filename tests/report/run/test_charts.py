"""Charts: what is read off them is certified, and lies where it is drawn."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hush.accounting.attacker.attacker import Attacker
from hush.accounting.epsilon import compose
from hush.report.run.axes import Axis
from hush.report.run.charts import charts
from hush.report.run.facts import RunFacts
from hush.report.run.page import HEIGHT, WIDTH, Drawing
from tests.report.run.conftest import STATISTICS, TRAINING

COUNTS = {STATISTICS: 2, TRAINING: 30}


def test_epsilon_read_at_a_delta_is_between_the_certified_ends(facts: RunFacts) -> None:
    chart = charts(facts)["epsilon-at-delta"]
    small = [reading for reading in chart.readings if reading.x <= 0.1]
    assert len(small) > 60
    for reading in small[::15]:
        bound, (height,) = compose(COUNTS, reading.x).epsilon, reading.heights
        assert bound.lower <= height <= bound.upper * 1.01, "it holds, and is within 1% of the least"
    shown = chart.readings[chart.start]
    assert shown.x == 1e-5
    assert shown.heights == (facts.epsilon.upper,)
    assert "this run" in shown.text


def test_the_marked_rates_are_the_attackers(facts: RunFacts) -> None:
    chart = charts(facts)["power"]
    attacker = Attacker(COUNTS)
    marks = next(line for line in chart.lines if line.style == "mark")
    for rate, power in marks.points:
        assert power == pytest.approx(attacker.true_positive_rate(rate))
        reading = next(each for each in chart.readings if each.x == rate)
        assert reading.heights == (power,)
    assert chart.readings[chart.start].x == 0.01


def test_the_posterior_at_even_odds_is_the_attackers(facts: RunFacts) -> None:
    chart = charts(facts)["posterior"]
    shown = chart.readings[chart.start]
    assert shown.x == 0.5
    assert shown.heights[0] == pytest.approx(Attacker(COUNTS).posterior(0.5), rel=1e-3)


def test_readings_go_from_left_to_right_and_stay_on_the_paper(facts: RunFacts) -> None:
    drawn = charts(facts)
    assert set(drawn) == {"epsilon-at-delta", "trade-off", "power", "posterior", "build-up"}
    for chart in drawn.values():
        drawing = Drawing(chart=chart)
        places = [place for place, _, _ in drawing.readings]
        assert places == sorted(places)
        assert 0 < drawing.left <= places[0] <= places[-1] <= drawing.right < WIDTH
        for _, heights, text in drawing.readings:
            assert all(0 < drawing.top <= height <= drawing.bottom < HEIGHT for height in heights)
            assert text
        assert 0 <= chart.start < len(chart.readings)


def test_accuracy_is_drawn_where_it_was_measured(facts: RunFacts) -> None:
    measured = [{"step": k, "epsilon": 0.1 * k, "accuracy": 0.5 + 0.1 * k} for k in (1, 2, 3)]
    chart = charts(replace(facts, metrics=tuple(measured), baseline=0.96))["accuracy"]
    assert [line.label for line in chart.lines] == ["without privacy", "this run"]
    assert chart.readings[-1].text == "accuracy 80% at epsilon 0.3001 (without privacy 96%)"
    unmeasured = [{**entry, "accuracy": math.nan} for entry in measured]
    assert "accuracy" not in charts(replace(facts, metrics=tuple(unmeasured)))


@given(
    low=st.floats(0, 1e3),
    length=st.floats(1e-3, 1e4),
    values=st.lists(st.floats(-1e5, 1e5), min_size=2, max_size=2),
)
def test_a_linear_axis_keeps_the_order(low: float, length: float, values: list[float]) -> None:
    axis = Axis(label="x", low=low, high=low + length)
    first, second = sorted(values)
    assert 0 <= axis.place(first) <= axis.place(second) <= 1
    ticks = [value for value, _ in axis.ticks()]
    assert 2 <= len(ticks) <= 7
    assert all(low - 1e-6 * length <= tick <= low + length * (1 + 1e-6) for tick in ticks)


@given(first=st.integers(-12, -1), decades=st.integers(1, 12))
def test_a_logarithmic_axis_is_marked_at_decades(first: int, decades: int) -> None:
    axis = Axis(label="x", low=10.0**first, high=10.0 ** (first + decades), log=True)
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 6
    assert ticks[-1][0] == pytest.approx(axis.high)
    assert axis.place(10.0 ** (first + decades / 2)) == pytest.approx(0.5)


def test_an_axis_without_length_is_refused() -> None:
    with pytest.raises(ValueError, match="no length"):
        Axis(label="x", low=1.0, high=1.0)
