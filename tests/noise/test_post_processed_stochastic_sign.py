import pytest
import torch
from scipy import stats

import hush


@pytest.mark.parametrize(("dtype", "secure"), [(torch.float32, False), (torch.float64, True)])
@pytest.mark.parametrize("location", [0.0, 0.7, -1.9])
def test_the_chance_of_plus_is_the_normal_mass_above_zero(
    location: float, dtype: torch.dtype, secure: bool
) -> None:
    source = None if secure else torch.Generator().manual_seed(4)
    around = torch.full((200_000,), location, dtype=dtype)
    noise = hush.StochasticSign(scale=1.3)
    drawn = hush.noise.sample(noise, around.shape, location=around, generator=source, secure=secure)
    assert drawn.dtype == dtype
    assert set(drawn.unique().tolist()) == {-1.0, 1.0}
    plus = int((drawn > 0).sum())
    assert stats.binomtest(plus, 200_000, stats.norm.cdf(location / 1.3)).pvalue > 1e-5
    assert stats.binomtest(plus, 200_000, stats.norm.cdf((location + 0.05) / 1.3)).pvalue < 1e-5


def test_no_third_sign_where_noise_and_location_are_lost_in_rounding() -> None:
    location = torch.full((1000,), 1e9)
    drawn = hush.noise.sample(hush.StochasticSign(scale=1e-12), (1000,), location=location)
    assert (drawn == 1).all()
    silent = hush.noise.sample(hush.StochasticSign(scale=1e-12), (1000,), location=torch.zeros(1000))
    assert (silent.abs() == 1).all()
