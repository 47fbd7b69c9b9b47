import pytest
import torch
from scipy import stats

import hush


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
