"""The bounded-support recipes: what is charged against what the paper charges, and known values."""

import pytest

from hush_recipes.bounded.fig1 import NOISES, bounded_fig1
from hush_recipes.bounded.mean import _best, _trials


def numbers(row: object) -> list[float]:
    assert isinstance(row, list)
    return [float(str(cell)) for cell in row]


def test_one_number_by_where_it_is() -> None:
    rows = {numbers(row)[0]: numbers(row)[1:] for row in bounded_fig1().rows}
    columns = {name: slice(3 * k, 3 * k + 3) for k, name in enumerate(NOISES)}
    eta, paper, charged = rows[0.0][columns["rectified"]]
    assert (eta**2, paper) == pytest.approx((0.936824, 0.897750), abs=1e-5)
    assert rows[3.0][columns["truncated"]][0] ** 2 == pytest.approx(0.109583, abs=1e-5)
    for row in rows.values():
        for name in NOISES:
            eta, paper, charged = row[columns[name]]
            assert 0 <= eta <= 1
            assert paper <= charged * (1 + 1e-9) <= 1 + 1e-6
    # the paper's charge is a fraction of what holds where the number is outside the support
    assert rows[-4.0][columns["rectified"]][1] < 0.1 * rows[-4.0][columns["rectified"]][2]


def test_one_setting_of_the_mean() -> None:
    paper, charged, change = _trials(0.0, 0.4, 0.4)
    # the centre of the support: 0.9368 of the Gaussian's, as the information, for so small a change
    assert charged == pytest.approx(0.9368, abs=2e-3)
    assert paper <= charged
    # clamped draws are nearer to a mean that is in the middle
    assert change < -0.2


def test_a_support_that_adds_error_is_not_chosen() -> None:
    rows: list[list[object]] = [
        [0.5, 0.1, 1.0, 0.2, 0.3, 0.9],
        [0.5, 0.1, 2.0, 0.7, 0.8, 0.004],
        [0.5, 0.1, 3.0, 0.9, 0.95, -0.1],
    ]
    assert _best(rows, 0.5, 0.1) == (0.7, 0.8, 0.004)
    assert _best(rows[:1], 0.5, 0.1) == (1.0, 1.0, 0.0)
