"""The private mean under every mechanism; ledgers that a release of statistics rejects."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hush
from hush.core.errors import DataError, LedgerError, Unsupported
from hush.core.guarantee import Adjacency, Neighbours
from hush.core.parts import Clipping, Noise, Sampling
from hush_recipes.statistics.moments import NoisyMoments, NoisyWhitening
from hush_recipes.statistics.quantile import NoisyQuantile
from tests.training.helpers import plan_of, seeded

ROWS = np.random.default_rng(0).uniform(-0.2, 1.0, size=(4000, 5))
TRUTH = ROWS.mean(0)


def plan(clipping: Clipping, noise: Noise, sampling: Sampling | None = None) -> hush.Plan:
    return plan_of(sampling, clipping, noise)


EVERY = [
    plan(hush.L2(3.0), hush.Gaussian(5.0)),
    plan(hush.Lp(p=1.0, norm=5.0), hush.Laplace(5.0)),
    plan(hush.Lp(p=1.5, norm=4.0), hush.GeneralizedGaussian(beta=1.5, multiplier=5.0)),
    plan(hush.L2(3.0), hush.GeneralizedGaussian(beta=3.0, multiplier=5.0)),
    plan(hush.Linf(1.0), hush.Gaussian(20.0)),
    plan(hush.L2(3.0), hush.Gaussian(5.0), hush.Poisson(0.5)),
    plan(hush.Linf(1.0), hush.Gaussian(20.0), hush.Coordinate(rate=0.5)),
    plan(hush.Linf(1.0), hush.Rectified(scale=20.0, bound=4000.0)),
    plan(hush.Linf(1.0), hush.Truncated(scale=20.0, bound=4000.0)),
    plan(hush.L2(3.0), hush.Quantized(scale=20.0, bound=4000.0, levels=4001)),
]


@pytest.mark.parametrize("each", EVERY, ids=lambda each: type(each.noise).__name__)
def test_every_mechanism_is_close_and_charged(each: hush.Plan) -> None:
    actual = hush.mean(ROWS, each, delta=1e-5, generator=seeded(3))
    assert actual.value.shape == (5,)
    assert np.abs(actual.value - TRUTH).max() < 0.05
    assert actual.guarantee == replace(hush.epsilon(each, 1, 1e-5, dimension=5), randomness="seeded")
    assert not actual.guarantee.sensitive


def test_the_noise_has_the_deviation_that_is_charged() -> None:
    each = plan(hush.L2(3.0), hush.Gaussian(5.0))
    generator = seeded(4)
    rows = ROWS[:400]
    draws = np.array([hush.mean(rows, each, delta=1e-5, generator=generator).value for _ in range(400)])
    assert draws.std(0) == pytest.approx([15 / 400] * 5, rel=0.12)
    assert draws.mean(0) == pytest.approx(rows.mean(0), abs=5 * 15 / 400 / 20)


def test_rows_are_clipped_and_left_as_they_were() -> None:
    rows = np.full((1000, 2), 100.0)
    for clipping, expected in ((hush.Linf(1.0), 1.0), (hush.L2(1.0), 0.5**0.5)):
        actual = hush.mean(rows, plan(clipping, hush.Gaussian(1.0)), delta=1e-5)
        assert actual.value == pytest.approx([expected] * 2, abs=0.02)
    assert (rows == 100).all()
    one = hush.mean(torch.ones(1000), plan(hush.L2(1.0), hush.Gaussian(1.0)), delta=1e-5)
    assert one.value == pytest.approx([1.0], abs=0.02)


@pytest.mark.parametrize(
    "records", [None, [["a"]], [[1.0], [1.0, 2.0]], torch.ones(4, 2, dtype=torch.complex64)], ids=str
)
def test_what_is_no_number_is_refused_without_being_shown(records: Any) -> None:
    with pytest.raises(DataError, match=r"records of type .* must be rows of finite real numbers"):
        hush.mean(records, EVERY[0], delta=1e-5)


def test_masked_entries_are_refused_and_a_mask_of_none_is_not() -> None:
    """`np.asarray` drops a mask: entries that a user has hidden would be summed."""
    each = plan(hush.L2(2.0), hush.Gaussian(4.0))
    hidden = np.ma.masked_greater(np.array([[0.5, 9.0], [0.2, 0.1]]), 5.0)
    assert np.asarray(hidden)[0, 1] == 9.0
    with pytest.raises(DataError, match=r"masked entries.*filled"):
        hush.mean(hidden, each, delta=1e-3)
    filled = np.ma.masked_array(hidden.filled(0.0), mask=False)
    values = [
        hush.mean(rows, each, delta=1e-3, generator=seeded()).value for rows in (filled, filled.data)
    ]
    assert values[0].tolist() == values[1].tolist()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_rows_that_are_not_dense_are_refused() -> None:
    quantized = torch.quantize_per_tensor(torch.ones(3, 2), 1.0, 0, torch.qint8)
    for rows in (torch.eye(3).to_sparse(), torch.ones(3, 2, device="meta"), quantized):
        with pytest.raises(DataError, match="sparse, quantized or meta"):
            hush.mean(rows, EVERY[0], delta=1e-5)


def test_a_mean_is_not_charged_as_a_release_that_hides() -> None:
    always = plan(hush.L2(1.0), hush.Gaussian(1.0))
    rarely = hush.Selective(rate=0.01, clip=1.0, multiplier=1.0, threshold=-8.0, test="mean")
    hidden = replace(always, release=rarely)
    charged, due = (hush.epsilon(each, 1, 1e-5).epsilon.upper for each in (hidden, always))
    assert charged < 0.7 * due, "rejected proposals are not paid for"
    with pytest.raises(Unsupported, match="a mean has no loss"):
        hush.mean(ROWS, hidden, delta=1e-5)
    # one group of three would pass for all records
    grouped = replace(always, sampling=hush.CyclicPoisson(rate=1.0, cycle=3))
    with pytest.raises(Unsupported, match="sample from all records in one step"):
        hush.mean(ROWS, grouped, delta=1e-5)


def test_coins_do_not_come_from_the_program_s_own_generator() -> None:
    """Seeded before every call, or at torch's fixed default, the coins of a rerun are still others."""
    importance = plan(hush.Importance(1.0), hush.Gaussian(1e-6))
    sums = set()
    for _ in range(3):
        torch.manual_seed(1234)
        before = torch.get_rng_state()
        sums.add(float(hush.mean(np.full((400, 1), 0.5), importance, delta=1e-5).value[0]))
        assert torch.equal(torch.get_rng_state(), before)
    assert len(sums) == 3


def test_a_mean_cannot_be_told_by_the_uniforms_its_noise_came_from() -> None:
    """Of torch's double normal draws, pairs in the tail come from uniforms that can be recognised."""
    rows = np.zeros((1, 800_000))
    noisy = plan(hush.L2(1.0), hush.Gaussian(1.0))

    private = hush.mean(rows, noisy, delta=1e-5)
    z = private.value[: private.value.size // 16 * 16].reshape(-1, 2, 8)
    squares = (z[:, 0] ** 2 + z[:, 1] ** 2).ravel()
    k = np.exp(-squares[squares > 13] / 2) * 2.0**53
    k = k[k < 2.0**43]
    assert abs(float(np.abs(k - k.round()).mean()) - 0.25) < 0.1
    assert private.guarantee.arithmetic == "proved"


RECORDS = torch.ones(20, 3, 2)
RELEASES: dict[str, Callable[[hush.Ledger], Any]] = {
    "moments": lambda ledger: NoisyMoments(multiplier=9.0)(RECORDS, ledger),
    "whitening": lambda ledger: NoisyWhitening(multiplier=9.0)(RECORDS, ledger),
    "quantile": lambda ledger: NoisyQuantile(multiplier=9.0)(RECORDS[:, :, 0], 0.5, ledger),
    "least squares": lambda ledger: hush.NoisyLeastSquares(multiplier=9.0, row_norm=1.5)(
        RECORDS[:, 0], RECORDS[:, 0], ledger
    ),
}


@pytest.mark.parametrize("name", RELEASES)
@pytest.mark.parametrize(
    "adjacency", [Adjacency(per_unit=2), Adjacency(neighbours=Neighbours.ADD_REMOVE)], ids=str
)
def test_a_ledger_of_users_or_other_neighbours_raises_before_any_draw(
    name: str, adjacency: Adjacency, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each statistic adds up records one by one: a guarantee for users would not cover its release."""
    ledger, draws = hush.Ledger(), []
    privatize = hush.Gaussian.privatize

    def watched(*arguments: Any, **options: Any) -> Tensor:
        draws.append(name)
        return privatize(*arguments, **options)

    monkeypatch.setattr(hush.Gaussian, "privatize", watched)
    ledger.charge(plan_of(noise=5.0), run="a", step=1, release="x", adjacency=adjacency)
    with pytest.raises(LedgerError, match="do not add up") as error:
        RELEASES[name](ledger)
    for part in (f"is for {adjacency}", "for one record (zero-out)", "separate ledger"):
        assert part in str(error.value)
    assert not draws
    assert sum(ledger.counts.values()) == 1
    RELEASES[name](hush.Ledger())
    assert draws
