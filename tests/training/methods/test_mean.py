"""The private mean with every mechanism there is."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import hush
from hush.core.errors import DataError, HushError, InvalidPlan, Unsupported
from hush.core.parts import Clipping, Noise, Sampling
from hush.training.methods.mean import individual_mean

ROWS = np.random.default_rng(0).uniform(-0.2, 1.0, size=(4000, 5))
TRUTH = ROWS.mean(0)


def plan(clipping: Clipping, noise: Noise, sampling: Sampling | None = None) -> hush.Plan:
    return hush.Plan(sampling=sampling or hush.FullBatch(), clipping=clipping, noise=noise)


EVERY = [
    plan(hush.L2(norm=3.0), hush.Gaussian(multiplier=5.0)),
    plan(hush.Lp(p=1.0, norm=5.0), hush.Laplace(multiplier=5.0)),
    plan(hush.Lp(p=1.5, norm=4.0), hush.GeneralizedGaussian(beta=1.5, multiplier=5.0)),
    plan(hush.L2(norm=3.0), hush.GeneralizedGaussian(beta=3.0, multiplier=5.0)),
    plan(hush.Linf(norm=1.0), hush.Gaussian(multiplier=20.0)),
    plan(hush.L2(norm=3.0), hush.Gaussian(multiplier=5.0), hush.Poisson(rate=0.5)),
    plan(hush.Linf(norm=1.0), hush.Gaussian(multiplier=20.0), hush.Coordinate(rate=0.5)),
    plan(hush.Linf(norm=1.0), hush.Rectified(scale=20.0, bound=4000.0)),
    plan(hush.Linf(norm=1.0), hush.Truncated(scale=20.0, bound=4000.0)),
    plan(hush.L2(norm=3.0), hush.Quantized(scale=20.0, bound=4000.0, levels=4001)),
]


@pytest.mark.parametrize("each", EVERY, ids=lambda each: type(each.noise).__name__)
def test_every_mechanism_is_close_and_charged(each: hush.Plan) -> None:
    actual = hush.mean(ROWS, each, delta=1e-5, generator=torch.Generator().manual_seed(3))
    assert actual.value.shape == (5,)
    assert np.abs(actual.value - TRUTH).max() < 0.05
    assert actual.guarantee == replace(hush.epsilon(each, 1, 1e-5, dimension=5), randomness="seeded")
    assert not actual.guarantee.sensitive


def test_the_noise_has_the_deviation_that_is_charged() -> None:
    each = plan(hush.L2(norm=3.0), hush.Gaussian(multiplier=5.0))
    generator = torch.Generator().manual_seed(4)
    draws = np.array([hush.mean(ROWS, each, delta=1e-5, generator=generator).value for _ in range(400)])
    assert draws.std(0) == pytest.approx([15 / 4000] * 5, rel=0.12)
    assert draws.mean(0) == pytest.approx(TRUTH, abs=5 * 15 / 4000 / 20)


def test_rows_are_clipped_and_left_as_they_were() -> None:
    rows = np.full((1000, 2), 100.0)
    for clipping, expected in ((hush.Linf(norm=1.0), 1.0), (hush.L2(norm=1.0), 0.5**0.5)):
        actual = hush.mean(rows, plan(clipping, hush.Gaussian(multiplier=1.0)), delta=1e-5)
        assert actual.value == pytest.approx([expected] * 2, abs=0.02)
    assert (rows == 100).all()
    one = hush.mean(torch.ones(1000), plan(hush.L2(norm=1.0), hush.Gaussian(multiplier=1.0)), delta=1e-5)
    assert one.value == pytest.approx([1.0], abs=0.02)


def test_signs_tell_the_sign() -> None:
    each = plan(hush.Linf(norm=1.0), hush.StochasticSign(scale=20.0))
    assert (hush.mean(ROWS, each, delta=1e-5).value * 4000 == 1).all()


def test_the_records_at_hand_are_asked_for_by_name() -> None:
    outside = plan(hush.Linf(norm=1.0), hush.Rectified(scale=20.0, bound=1000.0))
    guarantee = individual_mean(ROWS, outside, delta=1e-5)
    assert guarantee.sensitive
    assert guarantee.notion == "per-instance"
    assert guarantee.epsilon.upper < 0.1 * hush.epsilon(outside, 1, 1e-5, dimension=5).epsilon.upper
    assert "sensitive: do not publish" in str(guarantee)
    wide = plan(hush.Linf(norm=1.0), hush.Rectified(scale=20.0, bound=1e6))
    at_worst = hush.epsilon(wide, 1, 1e-5, dimension=5).epsilon.upper
    assert individual_mean(ROWS, wide, delta=1e-5).epsilon.upper == pytest.approx(at_worst)


@pytest.mark.parametrize("records", [[], [[1.0, np.nan]], np.zeros((2, 2, 2))])
def test_records_are_rows_of_numbers(records: np.ndarray) -> None:
    with pytest.raises(DataError, match="records of shape"):
        hush.mean(records, EVERY[0], delta=1e-5)


@pytest.mark.parametrize(
    "records", [None, [["a"]], [[1.0], [1.0, 2.0]], torch.ones(4, 2, dtype=torch.complex64)], ids=str
)
def test_what_is_no_number_is_refused_without_being_shown(records: Any) -> None:
    with pytest.raises(DataError, match=r"records of type .* must be a row of finite real numbers"):
        hush.mean(records, EVERY[0], delta=1e-5)


def test_a_plan_for_training_has_no_mean() -> None:
    sampling, noise = hush.Poisson(rate=0.5), hush.Gaussian(multiplier=5.0)
    tested = hush.Selective(rate=0.1, clip=0.1, multiplier=1.0, test="mean")
    based = hush.Subspaces(ranks=(2, 3), l2=(1.0, 1.0), bases=hush.Principal())
    for chosen in (
        hush.Plan(sampling=sampling, clipping=hush.L2(norm=1.0), noise=noise, release=tested),
        plan(based, noise),
    ):
        with pytest.raises(Unsupported, match="is for training"):
            hush.mean(ROWS, chosen, delta=1e-5)
    no_plan: Any = "plan.toml"
    with pytest.raises(InvalidPlan, match="is not a plan"):
        hush.mean(ROWS, no_plan, delta=1e-5)


def test_what_is_not_proved_is_not_run() -> None:
    with pytest.raises(HushError, match="no proved guarantee"):
        hush.mean(ROWS, plan(hush.Linf(norm=1.0), hush.Laplace(multiplier=1.0)), delta=1e-5)


def test_a_mean_is_not_charged_as_a_release_that_hides() -> None:
    always = plan(hush.L2(norm=1.0), hush.Gaussian(multiplier=1.0))
    rarely = hush.Selective(rate=0.01, clip=1.0, multiplier=1.0, threshold=-8.0, test="mean")
    hidden = replace(always, release=rarely)
    charged, due = (hush.epsilon(each, 1, 1e-5).epsilon.upper for each in (hidden, always))
    assert charged < 0.7 * due, "rejected proposals are not paid for"
    for work in (hush.mean, individual_mean):
        with pytest.raises(Unsupported, match="a mean is always shown"):
            work(ROWS, hidden, delta=1e-5)


def test_coins_do_not_come_from_the_program_s_own_generator() -> None:
    """Seeded before every call, or at torch's fixed default, the coins of a rerun are still others."""
    importance = plan(hush.Importance(norm=1.0), hush.Gaussian(multiplier=1e-6))
    sums = set()
    for _ in range(3):
        torch.manual_seed(1234)
        before = torch.get_rng_state()
        sums.add(float(hush.mean(np.full((400, 1), 0.5), importance, delta=1e-5, secure=True).value[0]))
        assert torch.equal(torch.get_rng_state(), before)
    assert len(sums) == 3


def test_a_mean_cannot_be_told_by_the_uniforms_its_noise_came_from() -> None:
    """Of torch's double normal draws, pairs in the tail come from uniforms that can be recognised."""
    rows = np.zeros((1, 800_000))
    noisy = plan(hush.L2(norm=1.0), hush.Gaussian(multiplier=1.0))

    def off(**options: Any) -> float:
        z = hush.mean(rows, noisy, delta=1e-5, **options).value
        z = z[: len(z) // 16 * 16].reshape(-1, 2, 8)
        squares = (z[:, 0] ** 2 + z[:, 1] ** 2).ravel()
        k = np.exp(-squares[squares > 13] / 2) * 2.0**53
        k = k[k < 2.0**43]
        return float(np.abs(k - k.round()).mean())

    assert abs(off() - 0.25) < 0.1
    assert hush.mean(rows, noisy, delta=1e-5).guarantee.arithmetic == "proved"
    assert hush.mean(rows, noisy, delta=1e-5, arithmetic="assumed").guarantee.arithmetic == "assumed"
