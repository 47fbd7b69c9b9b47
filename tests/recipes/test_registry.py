"""The recipes' names, and their numbers against computations of their own."""

import math
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import gamma

from hush_recipes.gg.dimension import gg_dimension
from hush_recipes.gg.noisy_votes import gg_fig10, histogram, laplace_scale, utility
from hush_recipes.registry import all_recipes


def spread(beta: float, coordinates: int) -> float:
    """How much more a change spread evenly over `many` coordinates costs than one in a single one."""

    def cost(shift: float) -> float:
        def moment(x: float) -> float:
            power = -2 * abs((x - shift) / 3) ** beta + abs(x / 3) ** beta
            return float(math.exp(power) / (6 * gamma(1 + 1 / beta)))

        return math.log(quad(moment, -40, 40, limit=400, epsabs=1e-13, points=[0, shift])[0])

    return coordinates * cost(coordinates ** (-1 / beta)) / cost(1.0)


def test_the_dimension_table_against_direct_integrals() -> None:
    figure = gg_dimension()
    rows = {row[0]: row for row in figure.rows}
    for column, beta in ((2, 2.33), (3, 3.0), (4, 4.0)):
        for coordinates in (16, 1000):
            evenly = spread(beta, coordinates)
            charged = float(str(rows[coordinates][column]))
            # the worst change costs at least the even one, and here hardly more
            assert evenly * 0.999 <= charged <= evenly * 1.02
            assert charged > 1.4  # what is printed, 1, is too little


def test_the_utility_of_a_vote_against_simulation() -> None:
    rng = np.random.default_rng(0)
    behind = np.array([5.0, 9.0, 20.0])
    size = rng.standard_gamma(1 / 3.0, (400_000, 4)) ** (1 / 3.0)
    noise = 8.0 * size * np.where(rng.random(size.shape) < 0.5, 1, -1)
    won = (noise[:, :1] > noise[:, 1:] - behind).all(axis=1).mean()
    assert float(utility(3.0, 8.0, behind[None])[0]) == pytest.approx(won, abs=3e-3)


def test_histograms_have_the_votes_and_the_gap() -> None:
    behind = histogram(0.1, np.random.default_rng(1))
    assert len(behind) == 24
    assert behind.min() == pytest.approx(10)
    assert (100 - behind).sum() == pytest.approx(900)


def test_laplace_and_gaussian_at_equal_divergence() -> None:
    scale, order = laplace_scale(3.0, 0.5), 3.0
    # Mironov 2017, Proposition 6
    up = order / (2 * order - 1) * math.exp((order - 1) / scale)
    down = (order - 1) / (2 * order - 1) * math.exp(-order / scale)
    assert math.log(up + down) / (order - 1) == pytest.approx(0.5, rel=1e-6)
    rows = {str(row[0]): [float(str(cell)) for cell in row[1:]] for row in gg_fig10().rows}
    for values in rows.values():
        assert values[0] == pytest.approx(0.5)
        assert values == sorted(values)
    # as the paper says, neither law is always the better one
    at_four = 2
    assert (
        rows["Gaussian, order 2, epsilon 0.1"][at_four] > rows["Laplace, order 2, epsilon 0.1"][at_four]
    )
    assert rows["Gaussian, order 50, epsilon 1"][at_four] < rows["Laplace, order 50, epsilon 1"][at_four]


ON_A_GPU = (
    *("gg-fig4-cifar10", "gg-fig4-imdb", "gg-table1", "twice-training"),
    *("bounded-fig3-cifar10", "bounded-fig4-cifar10", "dpsur-table4"),
    *("dpsur-table2-cifar10", "dpsur-table2-imdb"),
    *(name for name in all_recipes() if name.startswith("records-")),
)

FASHION = ("bounded-fig3", "bounded-fig4", "twice-cosine", "twice-fig2", "twice-fig3")
DATA = {
    "gg-fig3": ("pate-votes", "mnist"),
    "gg-fig4": ("adult",),
    "dpsur-table2-mnist": ("mnist",),
    "dpsur-nonprivate": ("mnist", "fashion-mnist"),
    **dict.fromkeys((*FASHION, "dpsur-fig9", "dpsur-table2", "dpsur-table3"), ("fashion-mnist",)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.real_data(*DATA.get(name, ())))
        for name in all_recipes()
        if name not in ON_A_GPU
    ],
)
def test_every_recipe_runs(name: str, tmp_path: Path) -> None:
    figure = all_recipes()[name]()
    assert figure.name == name
    assert all(path.exists() for path in figure.save(tmp_path))
