import math

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import gamma

import hush
from hush.core.errors import InvalidValue
from hush.core.parts import Noise

LAWS: list[tuple[Noise, float]] = [  # with beta
    (hush.Gaussian(1.7 / math.sqrt(2)), 2.0),
    (hush.Laplace(1.7), 1.0),
    *(
        (hush.GeneralizedGaussian(beta=beta, multiplier=1.7), beta)
        for beta in (1.0, 1.5, 2.0, 2.33, 4.0)
    ),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("source", ["seeded", "fresh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("noise", "beta"), LAWS)
def test_the_law_is_the_one_charged(noise: Noise, beta: float, dtype: torch.dtype, source: str) -> None:
    """Beta 2 is the normal law with the multiplier over the root of two, and beta 1 is Laplace."""
    location = torch.linspace(-3, 3, 500, dtype=dtype)
    drawn = hush.noise.sample(
        noise,
        (500, 500),
        norm=0.5,
        location=location,
        generator=None if source == "fresh" else torch.Generator().manual_seed(0),
    )
    assert drawn.dtype == dtype
    law, standard = stats.gennorm(beta), (drawn - location).double().flatten().numpy() / (1.7 * 0.5)
    assert stats.kstest(standard, law.cdf).pvalue > (1e-6 if source == "fresh" else 1e-3)
    for wrong in (0.95, 1.05):
        assert stats.kstest(standard * wrong, law.cdf).pvalue < 1e-6


@pytest.mark.parametrize(("beta", "sigma"), [(1.0, 3.0), (1.5, 0.4), (2.0, 8.0), (4.0, 50.0)])
def test_the_density_of_the_papers_sigma(beta: float, sigma: float) -> None:
    noise = hush.GeneralizedGaussian.from_sigma(beta=beta, sigma=sigma)
    x = np.linspace(-3, 3, 13)
    density = beta / (2 * sigma ** (1 / beta) * gamma(1 / beta)) * np.exp(-(np.abs(x) ** beta) / sigma)
    shape, scale = noise.exponential_power(1.0)
    np.testing.assert_allclose(stats.gennorm.pdf(x, shape, scale=scale), density, rtol=1e-12)
    # the multiplier is not sigma itself, and the law keeps its shape at other clipping norms
    assert beta == 1 or noise.multiplier != pytest.approx(sigma, rel=0.1)
    assert noise.exponential_power(0.5)[1] == pytest.approx(scale / 2)


@pytest.mark.parametrize(("beta", "sigma", "key"), [(0.0, 1.0, "beta"), (1.5, 0.0, "sigma")])
def test_from_sigma_names_the_argument_that_is_out_of_range(beta: float, sigma: float, key: str) -> None:
    with pytest.raises(hush.errors.InvalidValue, match=f"^{key}=0"):
        hush.GeneralizedGaussian.from_sigma(beta=beta, sigma=sigma)


def test_draws_differ_unless_the_generator_says_otherwise() -> None:
    noise = hush.Gaussian(1.0)
    assert not torch.equal(hush.noise.sample(noise, (9,)), hush.noise.sample(noise, (9,)))
    pair = [hush.noise.sample(noise, (9,), generator=torch.Generator().manual_seed(1)) for _ in "ab"]
    assert torch.equal(*pair)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
@pytest.mark.parametrize("noise", [hush.Gaussian(1.0), hush.Laplace(1.0)])
def test_what_noise_would_not_hide_is_refused(noise: Noise, dtype: torch.dtype) -> None:
    # Laplace noise has no imaginary part, and a complex normal number is smaller in each.
    with pytest.raises(InvalidValue, match="must be real floating-point numbers"):
        hush.noise.sample(noise, (4,), location=torch.zeros(4, dtype=dtype))


def test_noise_on_a_support_needs_its_location() -> None:
    with pytest.raises(InvalidValue, match="needs the location"):
        hush.noise.sample(hush.Rectified(scale=1.0, bound=2.0), (9,))
