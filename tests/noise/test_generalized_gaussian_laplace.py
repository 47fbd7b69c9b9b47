import numpy as np
import pytest
import torch
from scipy import stats

from hush.core.errors import InvalidValue
from hush.noise import sample
from hush.noise.generalized_gaussian import Laplace


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
