import pytest
import torch
from scipy import stats

import hush
from hush.core.errors import InvalidValue
from hush.core.parts import Noise


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_law_is_normal_around_the_location(dtype: torch.dtype) -> None:
    location = torch.linspace(-3, 3, 500, dtype=dtype)
    drawn = hush.noise.sample(
        hush.Gaussian(multiplier=1.7),
        (1000, 500),
        norm=0.5,
        location=location,
        generator=torch.Generator().manual_seed(0),
    )
    assert drawn.dtype == dtype
    noise = (drawn - location).double().flatten().numpy() / (1.7 * 0.5)
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    for wrong in (0.97, 1.03):
        assert stats.kstest(noise * wrong, "norm").pvalue < 1e-6


def test_draws_differ_unless_the_generator_says_otherwise() -> None:
    noise = hush.Gaussian(multiplier=1.0)
    assert not torch.equal(hush.noise.sample(noise, (9,)), hush.noise.sample(noise, (9,)))
    pair = [hush.noise.sample(noise, (9,), generator=torch.Generator().manual_seed(1)) for _ in "ab"]
    assert torch.equal(*pair)


def test_secure_draws_have_the_law_and_ask_no_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "randn", None)
    for noise, law in (
        (hush.Gaussian(multiplier=2.0), stats.norm(scale=2.0)),
        (hush.Laplace(multiplier=2.0), stats.laplace(scale=2.0)),
        (hush.GeneralizedGaussian(beta=4.0, multiplier=2.0), stats.gennorm(4.0, scale=2.0)),
    ):
        drawn = hush.noise.sample(noise, (200_000,), secure=True).numpy()
        assert stats.kstest(drawn, law.cdf).pvalue > 1e-6
        assert stats.kstest(drawn * 1.05, law.cdf).pvalue < 1e-6


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
@pytest.mark.parametrize("noise", [hush.Gaussian(multiplier=1.0), hush.Laplace(multiplier=1.0)])
def test_what_noise_would_not_hide_is_refused(noise: Noise, dtype: torch.dtype) -> None:
    # Laplace noise has no imaginary part, and a complex normal number is smaller in each.
    with pytest.raises(InvalidValue, match="must be real floating-point numbers"):
        hush.noise.sample(noise, (4,), location=torch.zeros(4, dtype=dtype))


@pytest.mark.parametrize("norm", [0.0, -1.0, float("nan"), float("inf")])
def test_a_norm_that_leaves_no_noise_is_refused(norm: float) -> None:
    with pytest.raises(InvalidValue, match="norm="):
        hush.noise.sample(hush.Laplace(multiplier=1.0), (4,), norm=norm)
