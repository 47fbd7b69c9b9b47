"""The GPU's draws: the pieces they are made of, anywhere; their law, where there is a GPU.

Without one, Triton's interpreter runs the kernel:
TRITON_INTERPRET=1 pytest tests/noise/exact/test_inverse_cdf.py
"""

import os
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy import stats

import hush
from hush.core.randomness import SystemSource
from hush.noise.exact import inverse_cdf
from tests.noise.law import deviations

BETAS = (1.0, 1.2, 1.5, 2.0, 2.33, 3.0, 4.0, 8.0)
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
DRAWS = 4_000_000 if DEVICE == "cuda" else 100_000
kernel = pytest.mark.skipif(
    find_spec("triton") is None or not (DEVICE == "cuda" or INTERPRETED),
    reason="there is no GPU, nor Triton's interpreter",
)


def drawn(beta: float, seed: int = 0, draws: int = DRAWS, scale: float = 1.0) -> npt.NDArray[np.float64]:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    zeros = torch.zeros(draws, device=DEVICE)
    assert inverse_cdf.fits(zeros, beta, generator) or DEVICE == "cpu"
    return inverse_cdf.add_noise(zeros, beta, scale, generator).cpu().double().numpy()


@pytest.mark.parametrize("beta", [*BETAS, 50.0])
def test_the_pieces_are_the_inverse_of_the_cdf(beta: float) -> None:
    table = inverse_cdf.pieces(beta)
    assert table.off < inverse_cdf.CORRECTION / 4
    law, half = stats.gennorm(beta), table.exact.shape[1] // 2
    # the first octave: chances from 1/2 down to 1/4, at the middle of each piece
    middle = table.exact.T @ 0.5 ** np.arange(inverse_cdf.DEGREE + 1)
    chance = 0.5 - (np.arange(inverse_cdf.PIECES) + 0.5) / (4 * inverse_cdf.PIECES)
    assert middle[: inverse_cdf.PIECES] == pytest.approx(law.isf(0.5 - chance / 2), rel=1e-7)
    assert middle[half : half + inverse_cdf.PIECES] == pytest.approx(law.isf(chance / 2), rel=1e-7)
    # they meet: the middle's ends where the tail's begins, and each piece's where the next one begins
    begin, end = table.exact[0], table.exact.sum(0)
    assert end[0] == pytest.approx(end[half], rel=1e-12)
    for part in (slice(0, half), slice(half, 2 * half)):
        assert begin[part][:-1] == pytest.approx(end[part][1:], rel=1e-11)


def test_fewer_pieces_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inverse_cdf, "PIECES", 4)
    inverse_cdf.pieces.cache_clear()
    assert inverse_cdf.pieces(1.5).off > inverse_cdf.CORRECTION
    monkeypatch.undo()
    inverse_cdf.pieces.cache_clear()


def test_what_the_kernel_does_not_draw_is_left_to_the_layers() -> None:
    generator = torch.Generator()
    assert not inverse_cdf.fits(torch.zeros(4), 1.5, generator)
    if DEVICE == "cuda":
        generator, zeros = torch.Generator("cuda"), torch.zeros(4, 2, device="cuda")
        assert inverse_cdf.fits(zeros, 1.5, generator)
        assert not inverse_cdf.fits(zeros.double(), 1.5, generator)
        assert not inverse_cdf.fits(zeros.T, 1.5, generator)
        assert not inverse_cdf.fits(zeros, 1.5, SystemSource(torch.device("cuda")))
        assert not inverse_cdf.fits(zeros, 1.5, torch.Generator())


@kernel
@pytest.mark.parametrize("beta", BETAS)
def test_the_law_is_the_one_named_and_no_other(beta: float) -> None:
    law = stats.gennorm(beta)
    values = drawn(beta)
    assert stats.kstest(values, law.cdf).pvalue > 1e-3
    assert deviations(values, beta).max() < 4.5
    cells = np.floor(1024 * law.cdf(values)).astype(int)
    assert stats.chisquare(np.bincount(cells, minlength=1024)).pvalue > 1e-3
    for wrong in (0.95, 1.05):
        assert stats.kstest(values * wrong, law.cdf).pvalue < 1e-6
    if DEVICE == "cuda":  # a change of beta takes many draws to see
        for wrong in (beta - 0.1, beta + 0.1):
            likelier = law.logpdf(values) - stats.gennorm.logpdf(values, wrong)
            assert likelier.sum() > 14


@kernel
@pytest.mark.parametrize("beta", [1.0, 2.33])
def test_the_far_tail_is_there(beta: float) -> None:
    # Beyond a chance of 2**-18 the kernel takes further bits: no gap and no pile where they begin.
    values = np.abs(np.concatenate([drawn(beta, seed) for seed in range(5 if DEVICE == "cuda" else 1)]))
    for chance in (2.0**-14, 2.0**-16, 2.0**-18, 2.0**-20):
        beyond, expected = (values > stats.gennorm(beta).isf(chance / 2)).sum(), len(values) * chance
        assert stats.poisson.cdf(beyond, expected) > 1e-5
        assert stats.poisson.sf(beyond - 1, expected) > 1e-5


@kernel
def test_single_precision_draws_are_not_coarse() -> None:
    values = np.abs(drawn(2.33))
    small = values[values < 2.0**-6]
    assert len(np.unique(small)) > 0.995 * len(small)
    assert np.sum(values % 2.0**-24 != 0) > 0.9 * np.sum(values < 2.0**-2)


@kernel
def test_entries_and_calls_are_independent_and_the_generator_decides() -> None:
    first, repeated, second = drawn(1.5, 1), drawn(1.5, 1), drawn(1.5, 2)
    assert np.array_equal(first, repeated)
    limit = 4.5 / np.sqrt(len(first))
    assert abs(np.corrcoef(first, second)[0, 1]) < limit
    # neighbours, and the two halves of a program, which share the words of a call
    for lag in (1, 2, 256, 512, 1024):
        assert abs(np.corrcoef(first[lag:], first[:-lag])[0, 1]) < limit
        assert abs(np.corrcoef(np.abs(first[lag:]), np.abs(first[:-lag]))[0, 1]) < limit
    generator = torch.Generator(DEVICE).manual_seed(1)
    zeros = torch.zeros(1000, device=DEVICE)
    pair = [inverse_cdf.add_noise(zeros.clone(), 1.5, 1.0, generator) for _ in range(2)]
    assert not torch.equal(*pair)


@kernel
@pytest.mark.parametrize("count", [1, 2, 511, 1024, 1025, 5000])
def test_every_entry_and_nothing_else_is_moved(count: int) -> None:
    around = torch.full((count + 64,), 3.0, device=DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(0)
    inverse_cdf.add_noise(around[:count], 2.0, 0.5, generator)
    assert (around[:count] != 3.0).all()
    assert (around[count:] == 3.0).all()
    noise = (around[:count] - 3.0).cpu().double().numpy()
    assert np.abs(noise - drawn(2.0, 0, count, 0.5)).max() < 1e-6


@kernel
@pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU")
def test_the_public_way_leads_here() -> None:
    noise = hush.GeneralizedGaussian(beta=1.5, multiplier=2.0)
    values = hush.noise.sample(noise, (1_000_000,), norm=0.5, device="cuda").cpu().double().numpy()
    assert stats.kstest(values, stats.gennorm(1.5).cdf).pvalue > 1e-6
