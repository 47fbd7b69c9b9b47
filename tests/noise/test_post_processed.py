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
