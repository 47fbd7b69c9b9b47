import numpy as np
import pytest
import torch
from scipy import stats

import hush
from hush.core.errors import InvalidValue


def chances(location: float, scale: float, bound: float, levels: int) -> np.ndarray:
    """The probability of each level: normal mass between the midpoints."""
    alphabet = np.linspace(-bound, bound, levels)
    cuts = np.concatenate([[-np.inf], (alphabet[1:] + alphabet[:-1]) / 2, [np.inf]])
    return np.diff(stats.norm.cdf(cuts, location, scale))


def counts(noise: hush.Quantized, location: float, dtype: torch.dtype, secure: bool) -> np.ndarray:
    source = None if secure else torch.Generator().manual_seed(3)
    around = torch.full((200_000,), location, dtype=dtype)
    drawn = hush.noise.sample(noise, around.shape, location=around, generator=source, secure=secure)
    assert drawn.dtype == dtype
    alphabet = np.linspace(-noise.bound, noise.bound, noise.levels)
    nearest = np.abs(drawn.double().numpy()[:, None] - alphabet).argmin(1)
    assert np.allclose(alphabet[nearest], drawn.double().numpy(), rtol=1e-6, atol=1e-6)
    return np.bincount(nearest, minlength=noise.levels)


def fits(found: np.ndarray, expected: np.ndarray) -> bool:
    some = expected * found.sum() > 5
    assert found[~some].sum() < 50
    share = expected[some] / expected[some].sum()
    return bool(stats.chisquare(found[some], share * found[some].sum()).pvalue > 1e-5)


@pytest.mark.parametrize(("dtype", "secure"), [(torch.float32, False), (torch.float64, True)])
@pytest.mark.parametrize(("location", "levels"), [(0.0, 5), (-2.0, 16), (0.4, 2)])
def test_each_level_has_the_mass_between_its_midpoints(
    location: float, levels: int, dtype: torch.dtype, secure: bool
) -> None:
    found = counts(hush.Quantized(scale=0.8, bound=1.5, levels=levels), location, dtype, secure)
    assert fits(found, chances(location, 0.8, 1.5, levels))
    assert not fits(found, chances(location, 0.85, 1.5, levels)) or (location, levels) == (0.0, 2)
    assert not fits(found, chances(location + 0.04, 0.8, 1.5, levels))


@pytest.mark.parametrize("levels", [1, 2.5, 2**17])
def test_there_are_between_two_levels_and_what_single_precision_tells_apart(levels: float) -> None:
    with pytest.raises(InvalidValue, match="levels="):
        hush.Quantized(scale=1.0, bound=1.0, levels=levels)  # type: ignore[arg-type]
