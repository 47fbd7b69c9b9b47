import math

import pytest
import torch
from scipy import stats

import hush
from hush.core.parts import Noise

LAWS: list[tuple[Noise, float]] = [  # with beta
    (hush.Gaussian(multiplier=1.7 / math.sqrt(2)), 2.0),
    (hush.Laplace(multiplier=1.7), 1.0),
    *(
        (hush.GeneralizedGaussian(beta=beta, multiplier=1.7), beta)
        for beta in (1.0, 1.5, 2.0, 2.33, 4.0)
    ),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("source", ["seeded", "secure", "assumed"])
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
        generator=None if source == "secure" else torch.Generator().manual_seed(0),
        secure=source == "secure",
        arithmetic="assumed" if source == "assumed" else "proved",
    )
    assert drawn.dtype == dtype
    law, standard = stats.gennorm(beta), (drawn - location).double().flatten().numpy() / (1.7 * 0.5)
    assert stats.kstest(standard, law.cdf).pvalue > (1e-6 if source == "secure" else 1e-3)
    for wrong in (0.95, 1.05):
        assert stats.kstest(standard * wrong, law.cdf).pvalue < 1e-6
    # a change of beta moves the cdf little but the likelihood much: exp(14) is a million to one
    for wrong in (beta - 0.1, beta + 0.1) if source == "seeded" else ():
        likelier = law.logpdf(standard) - stats.gennorm.logpdf(standard, wrong)
        assert likelier.sum() > 14
