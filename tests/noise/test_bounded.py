"""The four laws on a fixed support, against SciPy's: right ones pass, wrong ones fail."""

import re

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

import hush
from hush.core.errors import InvalidValue
from hush.core.parts import Noise
from hush.noise.bounded import quantile

KINDS = pytest.mark.parametrize(("dtype", "fresh"), [(torch.float32, False), (torch.float64, True)])


def draws(
    noise: Noise,
    location: float,
    dtype: torch.dtype = torch.float32,
    fresh: bool = False,
    count: int = 200_000,
) -> np.ndarray:
    source = None if fresh else torch.Generator().manual_seed(2)
    around = torch.full((count,), location, dtype=dtype)
    drawn = hush.noise.sample(noise, around.shape, location=around, generator=source)
    assert drawn.dtype == dtype
    return np.asarray(drawn.double())


def fits(x: np.ndarray, location: float, scale: float, bound: float) -> bool:
    """Whether the two atoms and the law between them are those of a rectified draw."""
    law = stats.norm(location, scale)
    atoms = [law.cdf(-bound), law.sf(bound)]
    counts = [int((x == -bound).sum()), int((x == bound).sum())]
    chances = [stats.binomtest(k, len(x), p).pvalue for k, p in zip(counts, atoms, strict=True)]
    inside = x[np.abs(x) < bound]
    share = (law.cdf(inside) - atoms[0]) / (1 - sum(atoms)) if len(inside) else np.array([0.5])
    return bool(min(*chances, stats.kstest(share, "uniform").pvalue) > 1e-5)


@KINDS
@pytest.mark.parametrize("location", [0.0, 0.9, -2.5])
def test_rectified_is_a_normal_with_its_tails_at_the_ends(
    location: float, dtype: torch.dtype, fresh: bool
) -> None:
    x = draws(hush.Rectified(scale=0.7, bound=1.5), location, dtype, fresh)
    assert fits(x, location, 0.7, 1.5)
    assert not fits(x, location, 0.72, 1.5)
    assert not fits(x, location + 0.03, 0.7, 1.5)


def test_rectified_far_outside_is_the_end_of_the_support() -> None:
    noise = hush.Rectified(scale=0.7, bound=1.5)
    assert (draws(noise, 701.5) == 1.5).all()
    assert (draws(noise, -701.5, torch.float64) == -1.5).all()


def test_the_scale_is_of_the_sum_whatever_the_clipping_norm() -> None:
    noise, location = hush.Rectified(scale=1.0, bound=2.0), torch.zeros(9)
    pair = [
        hush.noise.sample(
            noise, (9,), norm=norm, location=location, generator=torch.Generator().manual_seed(1)
        )
        for norm in (1.0, 50.0)
    ]
    assert torch.equal(*pair)


def levels_fit(x: np.ndarray, location: float, scale: float, bound: float, levels: int) -> bool:
    """Whether each level has the normal mass between its midpoints."""
    alphabet = np.linspace(-bound, bound, levels)
    nearest = np.abs(x[:, None] - alphabet).argmin(1)
    assert np.allclose(alphabet[nearest], x, rtol=1e-6, atol=1e-6)
    counted = np.bincount(nearest, minlength=levels)
    cuts = np.concatenate([[-np.inf], (alphabet[1:] + alphabet[:-1]) / 2, [np.inf]])
    expected = np.diff(stats.norm.cdf(cuts, location, scale))
    frequent = expected * counted.sum() > 5
    assert counted[~frequent].sum() < 50
    share = expected[frequent] / expected[frequent].sum()
    return bool(stats.chisquare(counted[frequent], share * counted[frequent].sum()).pvalue > 1e-5)


@KINDS
@pytest.mark.parametrize(("location", "levels"), [(0.0, 5), (-2.0, 16), (0.4, 2)])
def test_each_level_has_the_mass_between_its_midpoints(
    location: float, levels: int, dtype: torch.dtype, fresh: bool
) -> None:
    x = draws(hush.Quantized(scale=0.8, bound=1.5, levels=levels), location, dtype, fresh)
    assert levels_fit(x, location, 0.8, 1.5, levels)
    assert not levels_fit(x, location, 0.85, 1.5, levels)
    assert not levels_fit(x, location + 0.04, 0.8, 1.5, levels)


@pytest.mark.parametrize("levels", [1, 2.5, 2**17])
def test_there_are_between_two_levels_and_what_single_precision_tells_apart(levels: float) -> None:
    with pytest.raises(InvalidValue, match="levels="):
        hush.Quantized(scale=1.0, bound=1.0, levels=levels)  # type: ignore[arg-type]


@KINDS
@pytest.mark.parametrize("location", [0.0, 0.7, -1.9])
def test_the_chance_of_plus_is_the_normal_mass_above_zero(
    location: float, dtype: torch.dtype, fresh: bool
) -> None:
    drawn = draws(hush.StochasticSign(scale=1.3), location, dtype, fresh)
    assert set(drawn.tolist()) == {-1.0, 1.0}
    plus = int((drawn > 0).sum())
    assert stats.binomtest(plus, 200_000, stats.norm.cdf(location / 1.3)).pvalue > 1e-5
    assert stats.binomtest(plus, 200_000, stats.norm.cdf((location + 0.05) / 1.3)).pvalue < 1e-5


def truncated_cdf(x: np.ndarray, location: float, scale: float, bound: float) -> np.ndarray:
    """SciPy's, which is itself in log space."""
    ends = ((-bound - location) / scale, (bound - location) / scale)
    return np.asarray(stats.truncnorm.cdf(x, *ends, loc=location, scale=scale))


@pytest.mark.few(6)
@KINDS
@pytest.mark.parametrize("location", [0.0, 0.9, -2.5, 6.0, -9.0, 40.0, -1000.0])
def test_truncated_is_normal_given_the_support(location: float, dtype: torch.dtype, fresh: bool) -> None:
    x = draws(hush.Truncated(scale=0.7, bound=1.5), location, dtype, fresh, 100_000)
    assert np.abs(x).max() <= 1.5
    assert stats.kstest(x, lambda x: truncated_cdf(x, location, 0.7, 1.5)).pvalue > 1e-6
    for wrong in ((location, 0.8, 1.5), (location * 1.15 + 0.15, 0.7, 1.5)):
        assert stats.kstest(x, lambda x, wrong=wrong: truncated_cdf(x, *wrong)).pvalue < 1e-6


def test_the_inverse_cdf_to_the_last_digits() -> None:
    random = np.random.default_rng(5)
    outside = np.concatenate(
        [random.uniform(-6, 40, 100), 10 ** random.uniform(0, 6, 40), [15.99, 16.01]]
    )
    width = 2.5
    share = random.uniform(size=len(outside))
    depths = quantile(torch.tensor(outside), width, torch.tensor(share)).numpy()
    with mpmath.workdps(40):
        for m, u, t in zip(outside, share, depths, strict=True):
            tail = [mpmath.erfc((m + mpmath.mpf(x)) / mpmath.sqrt(2)) for x in (0, t, width)]
            # the share that belongs to the depth found; it moves with t at the rate of the density
            back = (tail[0] - tail[1]) / (tail[0] - tail[2])
            density = mpmath.sqrt(2 / mpmath.pi) * mpmath.exp(-((m + t) ** 2) / 2) / (tail[0] - tail[2])
            assert abs(back - u) / density < 1e-9 * t + 1e-14


@pytest.mark.parametrize("location", [3.0, 1e3, 1e9, 1e20, 3e38, -3e38])
def test_draws_far_outside_reach_no_further_than_the_support(location: float) -> None:
    drawn = draws(hush.Truncated(scale=1.0, bound=2.0), location, count=4096)
    assert (np.abs(drawn) <= 2.0).all()
    assert (drawn * location > 0).all() or location == 3.0


MEMORY = r"empty|slice|select|split|unbind|view|alias|detach"
"""Operations that compute nothing: memory may hold anything."""


class Operations(TorchDispatchMode):
    """Notes every operation, its shapes and its plain numbers, and counts denormal results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.all: list[object] = []
        self.denormal = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        plain = [tuple(x.shape) if isinstance(x, torch.Tensor) else repr(x) for x in args]
        self.all.append((str(func), plain))
        result = func(*args, **(kwargs or {}))
        computed = isinstance(result, torch.Tensor) and not re.search(MEMORY, str(func))
        if computed and result.dtype == torch.float64:
            # by their bits: arithmetic may take denormal numbers for zero
            size = result.view(torch.int64) & 2**63 - 1
            self.denormal += int(((size > 0) & (size < 2**52)).sum())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_work_is_the_same_wherever_the_location_is(dtype: torch.dtype) -> None:
    """A branch on the location would be a difference in time that tells where it is."""
    noise, done = hush.Truncated(scale=1.0, bound=2.0), []
    for location in (0.0, -1.5, 7.0, 9.0, 17.5, 35.0, -41.0, 50.0, 1e3, 1e6, 1e30):
        around = torch.full((70_000,), location, dtype=dtype)
        source = torch.Generator().manual_seed(0)
        with Operations() as note:
            noise.privatize(around, norm=1.0, generator=source)
        assert not note.denormal, f"a processor takes longer for tiny numbers, as met at {location}"
        done.append([call for call in note.all if "Generator" not in str(call)])
    assert len(done[0]) > 20
    # these branch inside: they take two or three times as long for some numbers
    assert not [call for call in done[0] if re.search("ndtri|erfinv|erfcx|log_ndtr", str(call))]
    assert all(calls == done[0] for calls in done)


def test_the_ends_of_the_shares_stay_in_the_support() -> None:
    outside = torch.tensor([-60.0, -3.0, 0.0, 5.0, 36.0, 1e3, 1e9, 1e200], dtype=torch.float64)
    for share in (0.0, 1 - 2.0**-53):
        depth = quantile(outside, 4.0, torch.full_like(outside, share))
        assert bool(((depth >= 0) & (depth <= 4.0)).all())
