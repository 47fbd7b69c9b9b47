"""The layers against exact areas, the draws against SciPy's law: right ones pass, wrong ones fail."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats
from scipy.special import gamma, gammaincc

from hush.core.randomness import SystemSource
from hush.noise.ziggurat import edges, standard, tail
from tests.noise.law import deviations

BETAS = (1.0, 1.2, 1.5, 2.0, 2.33, 3.0, 4.0, 8.0)
DRAWS = 250_000


def drawn(beta: float, dtype: torch.dtype, draws: int = DRAWS) -> npt.NDArray[np.float64]:
    generator = torch.Generator().manual_seed(0)
    values = standard(beta, (draws,), generator=generator, dtype=dtype)
    assert values.dtype == dtype
    return values.double().numpy()


@pytest.mark.parametrize("beta", [*BETAS, 50.0, 1e4])
def test_layers_have_equal_areas_that_add_up_to_the_area_under_the_curve(beta: float) -> None:
    width = np.array(edges(beta))
    height = np.exp(-(width[1:] ** beta))
    tail = gamma(1 + 1 / beta) * gammaincc(1 / beta, width[1] ** beta)
    areas = np.append(width[1] * height[0] + tail, width[1:-1] * np.diff(height))
    assert areas == pytest.approx(np.full(1024, areas[0]), rel=1e-8)
    # the lowest rectangle stands for the tail as well: it is as much wider as the tail is large
    assert width[0] * height[0] == pytest.approx(areas[0], rel=1e-12)
    # what the rectangles cover in excess of the curve is drawn again
    curve = gamma(1 + 1 / beta)
    assert 1 < areas.sum() / curve < 1.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("beta", BETAS)
def test_the_law_is_the_one_named_and_no_other(beta: float, dtype: torch.dtype) -> None:
    law = stats.gennorm(beta)
    values = drawn(beta, dtype)
    assert stats.kstest(values, law.cdf).pvalue > 1e-3
    assert deviations(values, beta).max() < 4.5
    for wrong in (0.95, 1.05):
        assert stats.kstest(values * wrong, law.cdf).pvalue < 1e-6
        assert deviations(values * wrong, beta).max() > 6
    # A change of beta moves the cdf little but the likelihood much: exp(14) is a million to one. The
    # larger beta, the more draws it takes.
    values = values if beta <= 3 else drawn(beta, dtype, 4_000_000)
    for other in (beta - 0.1, beta + 0.1):
        likelier = law.logpdf(values) - stats.gennorm.logpdf(values, other)
        assert likelier.sum() > 14


@pytest.mark.parametrize("beta", [1.0, 2.33, 4.0])
def test_no_layer_is_over_or_underfilled(beta: float) -> None:
    # Chi-square over 1024 cells of equal chance, fine enough to see a layer that is left out.
    values = drawn(beta, torch.float64)
    cells = np.floor(1024 * stats.gennorm(beta).cdf(values)).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue > 1e-3
    # one in four of those in the highest layer's reach left out: one draw in some hundred
    highest = np.abs(values) < edges(beta)[-2]
    cells = cells[~highest | (np.arange(len(values)) % 4 > 0)]
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue < 1e-6


@pytest.mark.parametrize("beta", BETAS)
def test_the_tail_beyond_the_layers_is_the_law_s(beta: float) -> None:
    edge, law = edges(beta)[1], stats.gennorm(beta)
    generator = torch.Generator().manual_seed(3)
    values = tail(beta, edge, 50_000, generator).numpy()

    def cdf(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(1 - law.sf(x) / law.sf(edge))

    assert stats.kstest(values, cdf).pvalue > 1e-3
    assert stats.kstest(edge + 0.95 * (values - edge), cdf).pvalue < 1e-6
    if beta >= 2:  # the exponential that the draws are chosen from is not the law
        slope = beta * edge ** (beta - 1)
        assert stats.kstest((values - edge) * slope, "expon").pvalue < 1e-6


def test_single_precision_draws_are_not_coarse() -> None:
    values = np.abs(drawn(2.33, torch.float32, 1_000_000))
    # 24-bit uniforms leave ties among a million draws, and multiples of 2**-24 alone.
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1_000_000, generator=generator).numpy()
    small = 2.0**-10
    assert len(np.unique(coarse[coarse < small])) < 0.98 * (coarse < small).sum()
    assert len(np.unique(values[values < small])) > 0.99 * (values < small).sum()
    assert np.sum(values % 2.0**-24 != 0) > 0.9 * np.sum(values < 2.0**-2)


def test_every_shape_and_small_type() -> None:
    generator = torch.Generator().manual_seed(0)
    for shape in ((), (0,), (3, 0), (2, 3, 4), (70_000, 2)):
        assert standard(1.5, shape, generator=generator, dtype=torch.float32).shape == shape
    for dtype in (torch.float16, torch.bfloat16):
        assert standard(1.5, (9,), generator=generator, dtype=dtype).dtype == dtype


def test_the_generator_decides_everything() -> None:
    pair = [
        standard(1.5, (100_000,), generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        for seed in (1, 1, 2)
    ]
    assert torch.equal(pair[0], pair[1])
    assert not torch.equal(pair[0], pair[2])
    global_state = torch.get_rng_state()
    standard(1.5, (1000,), generator=torch.Generator().manual_seed(1), dtype=torch.float32)
    assert torch.equal(global_state, torch.get_rng_state())


def test_the_system_s_source_gives_the_same_law() -> None:
    values = standard(
        3.0, (200_000,), generator=SystemSource(torch.device("cpu")), dtype=torch.float32
    ).numpy()
    assert stats.kstest(values, stats.gennorm(3.0).cdf).pvalue > 1e-6
    assert stats.kstest(values * 1.05, stats.gennorm(3.0).cdf).pvalue < 1e-6
