import pytest
import torch

import hush
from hush.core.errors import InvalidValue
from hush.core.parts import Noise


def test_draws_differ_unless_the_generator_says_otherwise() -> None:
    noise = hush.Gaussian(multiplier=1.0)
    assert not torch.equal(hush.noise.sample(noise, (9,)), hush.noise.sample(noise, (9,)))
    pair = [hush.noise.sample(noise, (9,), generator=torch.Generator().manual_seed(1)) for _ in "ab"]
    assert torch.equal(*pair)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.bool])
@pytest.mark.parametrize("noise", [hush.Gaussian(multiplier=1.0), hush.Laplace(multiplier=1.0)])
def test_what_noise_would_not_hide_is_refused(noise: Noise, dtype: torch.dtype) -> None:
    # Laplace noise has no imaginary part, and a complex normal number is smaller in each.
    with pytest.raises(InvalidValue, match="must be real floating-point numbers"):
        hush.noise.sample(noise, (4,), location=torch.zeros(4, dtype=dtype))


def test_noise_on_a_support_needs_its_location() -> None:
    with pytest.raises(InvalidValue, match="needs the location"):
        hush.noise.sample(hush.Rectified(scale=1.0, bound=2.0), (9,))
