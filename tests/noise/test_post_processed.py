import numpy as np
import pytest
import torch
from scipy import stats

import hush
from hush.core.errors import InvalidValue


def draws(location: float, dtype: torch.dtype = torch.float32, secure: bool = False) -> np.ndarray:
    source = None if secure else torch.Generator().manual_seed(2)
    around = torch.full((200_000,), location, dtype=dtype)
    noise = hush.Rectified(scale=0.7, bound=1.5)
    drawn = hush.noise.sample(noise, around.shape, location=around, generator=source, secure=secure)
    assert drawn.dtype == dtype
    return np.asarray(drawn.double())


def fits(x: np.ndarray, location: float, scale: float, bound: float) -> bool:
    """Whether the two atoms and the law between them are as they should be."""
    law = stats.norm(location, scale)
    atoms = [law.cdf(-bound), law.sf(bound)]
    counts = [int((x == -bound).sum()), int((x == bound).sum())]
    chances = [stats.binomtest(k, len(x), p).pvalue for k, p in zip(counts, atoms, strict=True)]
    inside = x[np.abs(x) < bound]
    share = (law.cdf(inside) - atoms[0]) / (1 - sum(atoms)) if len(inside) else np.array([0.5])
    return bool(min(*chances, stats.kstest(share, "uniform").pvalue) > 1e-5)


@pytest.mark.parametrize(("dtype", "secure"), [(torch.float32, False), (torch.float64, True)])
@pytest.mark.parametrize("location", [0.0, 0.9, -2.5])
def test_the_law_is_a_normal_with_its_tails_at_the_ends(
    location: float, dtype: torch.dtype, secure: bool
) -> None:
    x = draws(location, dtype, secure)
    assert fits(x, location, 0.7, 1.5)
    assert not fits(x, location, 0.72, 1.5)
    assert not fits(x, location + 0.03, 0.7, 1.5)


def test_a_truncated_draw_is_rejected() -> None:
    x = stats.truncnorm.rvs(-3.4, 0.86, loc=0.9, scale=0.7, size=200_000, random_state=0)
    assert not fits(x, 0.9, 0.7, 1.5)


def test_far_outside_it_is_the_end() -> None:
    assert (draws(701.5) == 1.5).all()
    assert (draws(-701.5, torch.float64) == -1.5).all()


def test_the_scale_is_of_the_sum_whatever_the_clipping_norm() -> None:
    noise, location = hush.Rectified(scale=1.0, bound=2.0), torch.zeros(9)
    pair = [
        hush.noise.sample(
            noise, (9,), norm=norm, location=location, generator=torch.Generator().manual_seed(1)
        )
        for norm in (1.0, 50.0)
    ]
    assert torch.equal(*pair)


def test_a_draw_to_be_added_later_is_refused() -> None:
    with pytest.raises(InvalidValue, match="needs the location"):
        hush.noise.sample(hush.Rectified(scale=1.0, bound=2.0), (9,))


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


def levels_fit(counted: np.ndarray, expected: np.ndarray) -> bool:
    frequent = expected * counted.sum() > 5
    assert counted[~frequent].sum() < 50
    share = expected[frequent] / expected[frequent].sum()
    return bool(stats.chisquare(counted[frequent], share * counted[frequent].sum()).pvalue > 1e-5)


@pytest.mark.parametrize(("dtype", "secure"), [(torch.float32, False), (torch.float64, True)])
@pytest.mark.parametrize(("location", "levels"), [(0.0, 5), (-2.0, 16), (0.4, 2)])
def test_each_level_has_the_mass_between_its_midpoints(
    location: float, levels: int, dtype: torch.dtype, secure: bool
) -> None:
    counted = counts(hush.Quantized(scale=0.8, bound=1.5, levels=levels), location, dtype, secure)
    assert levels_fit(counted, chances(location, 0.8, 1.5, levels))
    assert not levels_fit(counted, chances(location, 0.85, 1.5, levels)) or (location, levels) == (
        0.0,
        2,
    )
    assert not levels_fit(counted, chances(location + 0.04, 0.8, 1.5, levels))


@pytest.mark.parametrize("levels", [1, 2.5, 2**17])
def test_there_are_between_two_levels_and_what_single_precision_tells_apart(levels: float) -> None:
    with pytest.raises(InvalidValue, match="levels="):
        hush.Quantized(scale=1.0, bound=1.0, levels=levels)  # type: ignore[arg-type]


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
