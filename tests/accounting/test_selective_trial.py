"""The cost of selective trials: against the page's numbers, mpmath, and adversaries."""

import math
from collections.abc import Sequence
from dataclasses import replace

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hush.accounting.selective import Trial, acceptance_change
from hush.accounting.steps import SampledGaussian
from hush.core.release import Accounting
from tests.accounting.selective_oracle import (
    Array,
    Case,
    accepted_divergences,
    page_bound,
    proposals,
    trial_divergences,
)

RECORDS = 60_000
FASHION = Case(2048 / RECORDS, 4.0, 256 / RECORDS, 1.3, -0.5)


def trial(case: Case) -> Trial:
    return Trial(
        SampledGaussian(case.rate, case.deviation),
        SampledGaussian(case.test_rate, case.test_deviation),
        case.threshold,
    )


def rdp(of: Trial, orders: Sequence[float], accounting: Accounting = "per-trial") -> Array:
    return replace(of, accounting=accounting).rdp(np.array(orders))


def test_the_values_of_the_design() -> None:
    orders = [2, 6, 10, 20]
    assert rdp(trial(FASHION), orders) == pytest.approx(
        [5.612e-5, 1.691e-4, 2.832e-4, 5.736e-4], rel=2e-4
    )
    # the design's cells hold a maximum of two ends inside the expectation, which costs it up to 1%
    design = np.array([2.120e-4, 6.458e-4, 1.092e-3, 2.251e-3])
    ours = rdp(trial(FASHION), orders, "per-acceptance")
    assert (ours <= design).all()


@pytest.mark.parametrize(
    ("case", "order"),
    [
        (FASHION, 6.0),
        (Case(0.3, 1.0, 0.2, 0.8, -0.5), 2.0),
        (Case(0.01, 2.0, 1.0, 2.0, -1.0), 1.3),
        (Case(1.0, 3.0, 0.1, 1.0, 0.0), 8.0),
    ],
)
def test_one_trial_against_mpmath(case: Case, order: float) -> None:
    with mpmath.workdps(15):
        page = max(page_bound(case, order, present) for present in (True, False))
    ours = float(rdp(trial(case), [order])[0])
    composed = float(rdp(trial(case), [order], "published")[0])
    assert min(page, composed) * (1 - 1e-9) <= ours <= min(page * (1 + 3e-5), composed)


def random_acceptances(generator: np.random.Generator, case: Case, points: int) -> tuple[Array, Array]:
    """A random way to accept: two functions of the proposal with a few jumps, at the ends or between."""
    lowest, highest = case.accept
    x, _, _ = proposals(case, points)
    pieces = generator.integers(1, 6)
    places = np.searchsorted(np.sort(generator.choice(x, pieces)), x)
    values = generator.uniform(0, 1, (2, pieces + 1))
    if generator.random() < 0.7:
        values = np.round(values)
    without, with_record = lowest + (highest - lowest) * values[:, places]
    return without, with_record


cases = st.builds(
    Case,
    rate=st.floats(0.01, 1.0),
    deviation=st.floats(0.6, 5.0),
    test_rate=st.floats(0.005, 1.0),
    test_deviation=st.floats(0.5, 3.0),
    threshold=st.floats(-1.0, 1.0),
)


@settings(max_examples=25)
@given(case=cases, order=st.floats(1.1, 12.0), seed=st.integers(0, 2**32 - 1))
def test_no_adversary_beats_the_sound_bounds(case: Case, order: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    ours = trial(case)
    trial_bound, accepted_bound = (
        float(rdp(ours, [order])[0]),
        float(rdp(ours, [order], "per-acceptance")[0]),
    )
    low, high = acceptance_change(ours)
    for _ in range(6):
        acceptances = random_acceptances(generator, case, 2000)
        assert max(trial_divergences(case, *acceptances, order)) <= trial_bound * (1 + 1e-6) + 1e-12
        assert (
            max(accepted_divergences(case, *acceptances, order)) <= accepted_bound * (1 + 1e-6) + 1e-12
        )
        _, q, p = proposals(case, 2000)
        with_record = (1 - case.test_rate) * acceptances[0] + case.test_rate * acceptances[1]
        change = float((with_record * p).sum() / (acceptances[0] * q).sum())
        assert low * (1 - 1e-9) <= change <= high * (1 + 1e-9)


def flipped(case: Case, share: float, points: int) -> tuple[Array, Array]:
    """The record turns the test from accepting to refusing on a share of the proposals, and back."""
    lowest, highest = case.accept
    _, q, _ = proposals(case, points)
    first = np.cumsum(q) <= share
    return np.where(first, lowest, highest), np.where(first, highest, lowest)


@pytest.mark.parametrize(
    ("deviation", "order", "true", "claimed"),
    [
        (0.8, 1.5, 1.500, 1.172),
        (0.8, 2.0, 1.810, 1.563),
        (1.0, 1.5, 0.883, 0.750),
        (1.0, 2.0, 1.101, 1.000),
        (1.3, 1.5, 0.471, 0.444),
        (1.3, 2.0, 0.604, 0.592),
    ],
)
def test_a_record_that_flips_verdicts_beats_the_published_charge(
    deviation: float, order: float, true: float, claimed: float
) -> None:
    # the training leaks nothing: its noise drowns everything
    case = Case(1.0, 1e4, 1.0, deviation, -0.5)
    says = float(rdp(trial(case), [order], "published")[0])
    assert says == pytest.approx(claimed, rel=1e-3)
    largest = max(
        max(accepted_divergences(case, *flipped(case, share, 4000), order))
        for share in np.linspace(0.02, 0.98, 97)
    )
    assert largest == pytest.approx(true, rel=2e-3)
    assert says < largest <= float(rdp(trial(case), [order], "per-acceptance")[0])


@pytest.mark.parametrize(("deviation", "ratio"), [(0.8, 1.34), (1.0, 1.16), (1.3, 1.03)])
def test_sampling_does_not_save_the_published_charge(deviation: float, ratio: float) -> None:
    case = Case(1.0, 1e6, 256 / RECORDS, deviation, -0.5)
    largest = max(
        max(accepted_divergences(case, *flipped(case, share, 4000), 2.0))
        for share in np.linspace(0.02, 0.98, 97)
    )
    assert largest / float(rdp(trial(case), [2.0], "published")[0]) == pytest.approx(ratio, abs=0.01)
    assert largest <= float(rdp(trial(case), [2.0], "per-acceptance")[0])


def test_the_bounds_are_close_to_what_an_adversary_reaches() -> None:
    """Where training leaks nothing, the flipping record reaches most of the per-trial bound."""
    case = Case(1.0, 1e6, 256 / RECORDS, 1.3, -0.5)
    lowest, highest = case.accept
    everywhere = np.full(4000, lowest), np.full(4000, highest)
    largest = max(trial_divergences(case, *everywhere, 2.0))
    bound = float(rdp(trial(case), [2.0])[0])
    assert 0.8 * bound <= largest <= bound


@pytest.mark.parametrize("order", [1.0001, 2.0, 64.0, 1000.0, 1e6])
@pytest.mark.parametrize("deviation", [1e-3, 1.0, 1e6])
@pytest.mark.parametrize("rate", [1e-9, 0.5, 1.0])
@pytest.mark.parametrize("threshold", [-1e8, -30.0, 0.0, 30.0])
def test_extremes_are_silent(order: float, deviation: float, rate: float, threshold: float) -> None:
    ours = trial(Case(rate, deviation, rate, max(deviation, 0.5), threshold))
    trial_bound, accepted_bound = (
        float(rdp(ours, [order])[0]),
        float(rdp(ours, [order], "per-acceptance")[0]),
    )
    assert trial_bound >= 0
    assert accepted_bound >= 0
    assert not math.isnan(trial_bound + accepted_bound)
    composed = rdp(ours, [order], "published")
    assert trial_bound <= composed[0]
