import math

import numpy as np
import pytest
import torch
from scipy import stats

from hush.core.errors import InvalidValue
from hush.noise import sample
from hush.noise.gaussian import GeneralizedGaussian, Laplace


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("beta", "dtype"),
    [(1.0, torch.float64), (1.5, torch.float32), (2.33, torch.float64), (4.0, torch.float32)],
)
def test_the_law_is_the_one_charged(beta: float, dtype: torch.dtype) -> None:
    location = torch.linspace(-3, 3, 500, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    noise = GeneralizedGaussian(beta=beta, multiplier=1.7)
    drawn = sample(noise, (500, 500), norm=0.5, location=location, generator=generator)
    assert drawn.dtype == dtype
    standard = (drawn - location).double().flatten().numpy() / (1.7 * 0.5)
    assert stats.kstest(standard, stats.gennorm(beta).cdf).pvalue > 1e-3
    for wrong in (0.95, 1.05):
        assert stats.kstest(standard * wrong, stats.gennorm(beta).cdf).pvalue < 1e-6
    # a change of beta moves the cdf little but the likelihood much: exp(14) is a million to one
    for wrong in (beta - 0.1, beta + 0.1):
        likelier = stats.gennorm.logpdf(standard, beta) - stats.gennorm.logpdf(standard, wrong)
        assert likelier.sum() > 14


def test_beta_two_is_the_normal_law_with_the_multiplier_over_root_two() -> None:
    generator = torch.Generator().manual_seed(1)
    drawn = sample(GeneralizedGaussian(beta=2, multiplier=3.0), (200_000,), generator=generator)
    assert stats.kstest(drawn.double().numpy() / (3.0 / math.sqrt(2)), "norm").pvalue > 1e-3


@pytest.mark.parametrize("beta", [0.99, -1, math.nan])
def test_beta_below_one_is_refused(beta: float) -> None:
    with pytest.raises(InvalidValue, match=r"beta=.* must be .* >= 1.*log-concave.*Pass e\.g\. beta"):
        GeneralizedGaussian(beta=beta, multiplier=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_law_is_laplace_around_the_location(dtype: torch.dtype) -> None:
    location = torch.linspace(-3, 3, 500, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    drawn = sample(Laplace(multiplier=1.7), (400, 500), norm=0.5, location=location, generator=generator)
    assert drawn.dtype == dtype
    noise = (drawn - location).double().flatten().numpy() / (1.7 * 0.5)
    assert stats.kstest(noise, "laplace").pvalue > 1e-3
    for wrong in (0.95, 1.05):
        assert stats.kstest(noise * wrong, "laplace").pvalue < 1e-6
    assert stats.kstest(np.abs(noise), "expon").pvalue > 1e-3


def test_a_multiplier_must_be_positive() -> None:
    with pytest.raises(InvalidValue, match=r"multiplier=0 must be .* >= 1e-12.*nothing is private"):
        Laplace(multiplier=0)
