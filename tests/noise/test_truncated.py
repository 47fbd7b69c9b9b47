import itertools
import re

import mpmath
import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils._python_dispatch import TorchDispatchMode

import hush
from hush.core.errors import InvalidValue
from hush.noise.truncated import quantile
from hush.noise.truncated_float32 import NARROW, SingleTruncated


def cdf(x: np.ndarray, location: float, scale: float, bound: float) -> np.ndarray:
    """SciPy's, which is itself in log space."""
    ends = ((-bound - location) / scale, (bound - location) / scale)
    return np.asarray(stats.truncnorm.cdf(x, *ends, loc=location, scale=scale))


@pytest.mark.few(6)
@pytest.mark.parametrize(("dtype", "secure"), [(torch.float32, False), (torch.float64, True)])
@pytest.mark.parametrize("location", [0.0, 0.9, -2.5, 6.0, -9.0, 40.0, -1000.0])
def test_the_law_is_normal_given_the_support(location: float, dtype: torch.dtype, secure: bool) -> None:
    noise = hush.Truncated(scale=0.7, bound=1.5)
    source = None if secure else torch.Generator().manual_seed(1)
    around = torch.full((100_000,), location, dtype=dtype)
    drawn = hush.noise.sample(noise, (100_000,), location=around, generator=source, secure=secure)
    assert drawn.dtype == dtype
    assert float(drawn.abs().max()) <= 1.5
    x = drawn.double().numpy()
    assert stats.kstest(x, lambda x: cdf(x, location, 0.7, 1.5)).pvalue > 1e-6
    for wrong in ((location, 0.8, 1.5), (location * 1.15 + 0.15, 0.7, 1.5)):
        assert stats.kstest(x, lambda x, wrong=wrong: cdf(x, *wrong)).pvalue < 1e-6


def test_wrong_laws_are_rejected() -> None:
    """What one might write instead: clamp, or add bounded noise to the location."""
    source = np.random.default_rng(0)
    clamped = np.clip(0.9 + 0.7 * source.standard_normal(100_000), -1.5, 1.5)
    added = np.clip(
        0.9 + stats.truncnorm.rvs(-2, 2, scale=0.7, size=100_000, random_state=source), -2, 2
    )
    for wrong in (clamped, added):
        assert stats.kstest(wrong, lambda x: cdf(x, 0.9, 0.7, 1.5)).pvalue < 1e-6


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


@pytest.mark.parametrize("width", [NARROW, 1.0, 4.0, 20.0])
def test_single_precision_against_the_double_formula(width: float) -> None:
    """To 3e-4 of how deep draws are, the rarest among them; most to 1e-5."""
    source, many = torch.Generator().manual_seed(3), 10_000
    depth, *memory = torch.empty(7, many)
    ends = (-width / 2, 0.0, 1.0, 4.0, 7.9, 8.1, 30.0, 1e6)
    for low, high in itertools.pairwise(ends):
        outside = torch.rand(many, generator=source) * (high - low) + low
        share = torch.rand(many, generator=source)
        exact = quantile(outside.double(), width, share.double())
        SingleTruncated(1.0, width / 2, 1, outside.device).quantile(
            outside.clone(), share, depth, memory
        )
        deep = (1 / (1 + outside.clamp(min=0))).clamp(max=width)
        off = ((depth - exact).abs() / deep).double()
        assert float(off.max()) < 3e-4, (low, high)
        assert float(off.median()) < 1e-5, (low, high)


def test_single_precision_draws_far_outside_reach_no_further_than_the_support() -> None:
    for location in (3.0, 1e3, 1e9, 1e20, 3e38, -3e38):
        around = torch.full((4096,), location)
        drawn = hush.noise.sample(hush.Truncated(scale=1.0, bound=2.0), (4096,), location=around)
        assert bool((drawn.abs() <= 2.0).all())
        assert bool((drawn * location > 0).all()) or location == 3.0


MEMORY = r"empty|slice|select|split|unbind|view|alias|detach"
"""What works nothing out: memory may hold anything."""


def tiny(values: torch.Tensor) -> int:
    """How many are denormal, by their bits: arithmetic may take them for zero."""
    if not values.is_floating_point():
        return 0
    kind = torch.int32 if values.dtype == torch.float32 else torch.int64
    size = values.view(kind) & torch.iinfo(kind).max
    smallest = torch.tensor(torch.finfo(values.dtype).tiny, dtype=values.dtype).view(kind)
    return int(((size > 0) & (size < smallest)).sum())


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
        if isinstance(result, torch.Tensor) and not re.search(MEMORY, str(func)):
            self.denormal += tiny(result)
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
    # written with branches of their own: they take two or three times as long for some numbers
    assert not [call for call in done[0] if re.search("ndtri|erfinv|erfcx|log_ndtr", str(call))]
    assert all(calls == done[0] for calls in done)


def test_the_ends_of_the_shares_stay_in_the_support() -> None:
    outside = torch.tensor([-60.0, -3.0, 0.0, 5.0, 36.0, 1e3, 1e9, 1e200], dtype=torch.float64)
    for share in (0.0, 1 - 2.0**-53):
        depth = quantile(outside, 4.0, torch.full_like(outside, share))
        assert bool(((depth >= 0) & (depth <= 4.0)).all())


def test_it_draws_in_place_whatever_the_shape() -> None:
    location = torch.zeros(3, 40_000)
    drawn = hush.Truncated(scale=1.0, bound=2.0).privatize(
        location, norm=1.0, generator=torch.Generator().manual_seed(0)
    )
    assert drawn.shape == (3, 40_000)
    assert drawn.data_ptr() == location.data_ptr()
    nobody = torch.zeros(0)
    assert hush.noise.sample(hush.Truncated(scale=1.0, bound=2.0), (0,), location=nobody).shape == (0,)
    # the variance of a normal within two deviations
    assert float(drawn.var()) == pytest.approx(0.7737, rel=0.02)


def test_a_support_must_hold_something() -> None:
    with pytest.raises(InvalidValue, match=r"bound=0 must be .*without looking at the records"):
        hush.Truncated(scale=1.0, bound=0)
    with pytest.raises(InvalidValue, match=r"scale=-1 must be .*nothing is private"):
        hush.Truncated(scale=-1, bound=1)
