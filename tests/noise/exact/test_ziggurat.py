"""Exact draws against SciPy's law and against rational arithmetic: right ones pass, wrong ones fail."""

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

import hush
from hush.core.randomness import Stream, SystemSource, source_for
from hush.noise.exact.layers import layers
from hush.noise.exact.ziggurat import add_noise, grid_spacing
from tests.noise.law import deviations

BETAS = (1.0, 1.2, 1.5, 2.0, 2.33, 3.0, 4.0, 8.0)
DRAWS = 250_000
CPU = torch.device("cpu")


def stream(seed: int = 0) -> Stream:
    return Stream(CPU, seed.to_bytes(32, "big"))


def drawn(
    beta: float, dtype: torch.dtype = torch.float64, draws: int = DRAWS
) -> npt.NDArray[np.float64]:
    values = add_noise(torch.zeros(draws, dtype=dtype), beta, 1.0, stream())
    assert values.dtype == dtype
    return values.double().numpy()


@pytest.mark.few(3)
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
    values = values if beta <= 3 or dtype == torch.float32 else drawn(beta, dtype, 4_000_000)
    for wrong in (beta - 0.1, beta + 0.1) if len(values) > DRAWS or beta <= 3 else ():
        likelier = law.logpdf(values) - stats.gennorm.logpdf(values, wrong)
        assert likelier.sum() > 14


@pytest.mark.parametrize("beta", [1.0, 2.33, 4.0])
def test_no_layer_is_over_or_underfilled(beta: float) -> None:
    # Chi-square over 1024 cells of equal chance, fine enough to see a layer that is left out.
    values = drawn(beta)
    cells = np.floor(1024 * stats.gennorm(beta).cdf(values)).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue > 1e-3
    # one in four of the places in the middle left out: one draw in some hundred
    middle = np.abs(values) < layers(beta).inner[-2]
    cells = cells[~middle | (np.arange(len(values)) % 4 > 0)]
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue < 1e-6


def test_draws_are_on_the_grid() -> None:
    for scale in (1e-12, 0.3, 1.0, 7e9):
        values = add_noise(torch.zeros(1000, dtype=torch.float64), 2.0, scale, stream())
        assert torch.equal(values / grid_spacing(scale), (values / grid_spacing(scale)).round())
        assert 2.0**-15 < grid_spacing(scale) / scale <= 2.0**-14


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_zero_does_not_tell_the_sign_of_its_location(dtype: torch.dtype) -> None:
    for location in (-1e-9, -0.0, 0.0, 1e-9):
        values = add_noise(torch.full((500_000,), location, dtype=dtype), 2.0, 1.0, stream())
        zeros = values[values == 0]
        assert len(zeros) > 5
        assert not zeros.signbit().any()


def whole(noise: torch.Tensor) -> float:
    """How far pairs in the tail are from coming from 24-bit uniforms, as torch's; 1/4 if unrelated."""
    z = noise.double().numpy()
    z = z[: len(z) // 16 * 16].reshape(-1, 2, 8)
    k = np.exp(-(z[:, 0] ** 2 + z[:, 1] ** 2) / 2).ravel() * 2**24
    k = k[(k > 1.5) & (k < 200_000)]
    return float(np.abs(k - k.round()).mean())


def test_noise_cannot_be_told_by_the_uniforms_it_came_from() -> None:
    shape = (2_000_000,)
    noise = hush.Gaussian(multiplier=1.0)
    assert abs(whole(hush.noise.sample(noise, shape)) - 0.25) < 0.05
    # torch's own normal draws can: an attacker tells right from wrong sums by them
    assert whole(hush.noise.sample(noise, shape, arithmetic="assumed")) < 0.05


def test_every_shape_and_small_type() -> None:
    for shape in ((), (0,), (3, 0), (2, 3, 4), (70_000, 2)):
        assert add_noise(torch.zeros(shape), 1.5, 1.0, stream()).shape == shape
    for dtype in (torch.float16, torch.bfloat16):
        assert add_noise(torch.zeros(9, dtype=dtype), 1.5, 1.0, stream()).dtype == dtype


def test_the_source_decides_everything() -> None:
    pair = [add_noise(torch.zeros(100_000), 1.5, 1.0, stream(seed)) for seed in (1, 1, 2)]
    assert torch.equal(pair[0], pair[1])
    assert not torch.equal(pair[0], pair[2])
    global_state = torch.get_rng_state()
    add_noise(torch.zeros(1000), 1.5, 1.0, source_for(CPU))
    assert torch.equal(global_state, torch.get_rng_state())


def test_prepared_noise_is_the_same_noise() -> None:
    location = torch.randn(3000, dtype=torch.float64)
    for noise in (
        hush.Gaussian(multiplier=2.0),
        hush.Laplace(multiplier=2.0),
        hush.Rectified(scale=2.0, bound=1.0),
    ):
        at_once = noise.privatize(location.clone(), norm=0.5, generator=stream())
        prepared = noise.prepare(3000, norm=0.5, generator=stream(), device=CPU)(location.clone())
        assert torch.equal(at_once, prepared)


def test_the_system_s_source_gives_the_same_law() -> None:
    values = add_noise(torch.zeros(200_000), 3.0, 1.0, SystemSource(CPU)).numpy()
    assert stats.kstest(values, stats.gennorm(3.0).cdf).pvalue > 1e-6
    assert stats.kstest(values * 1.05, stats.gennorm(3.0).cdf).pvalue < 1e-6


def test_prepared_noise_hides_one_sum() -> None:
    privatize = hush.Gaussian(multiplier=1.0).prepare(5, norm=1.0, generator=stream(), device=CPU)
    privatize(torch.zeros(5, dtype=torch.float64))
    with pytest.raises(IndexError):
        privatize(torch.ones(5, dtype=torch.float64))
