"""Selective plans through `hush.rdp`, `hush.epsilon`, `hush.calibrate`, the ledger and plan files."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hush
from hush import plans
from hush.accounting import epsilon as charge
from hush.accounting.pld import accountant
from hush.accounting.rdp import gaussian
from hush.accounting.steps import SampledGaussian
from hush.core.release import GIVEN_UP

RECORDS = 60_000


def plan(
    batch: int = 2048,
    noise: float = 4.0,
    test_noise: float = 1.3,
    test_batch: int = 256,
    records: int = RECORDS,
    **release: Any,
) -> hush.Plan:
    return hush.Plan(
        sampling=hush.Poisson(batch / records),
        clipping=hush.L2(0.1),
        noise=hush.Gaussian(noise),
        release=hush.Selective(
            rate=test_batch / records, clip=0.001, multiplier=test_noise, **{"test": "mean", **release}
        ),
    )


def upper(chosen: hush.Plan, steps: float) -> float:
    return hush.epsilon(chosen, steps=round(steps), delta=1e-5).epsilon.upper


# claimed, and per trial with half, 40% and 35% accepted, and per acceptance: the design's table
TABLE = [
    ({}, 646, (1.00, 1.11, 1.25, 1.34, 1.59)),
    ({"noise": 2.15, "test_noise": 0.8}, 1946, (4.00, 4.12, 4.70, 5.04, 8.57)),
    (
        {"batch": 8192, "noise": 5.67, "test_noise": 1.1, "records": 50_000},
        492,
        (3.00, 3.25, 3.66, 3.93, 4.77),
    ),
]


@pytest.mark.parametrize(("settings", "updates", "design"), TABLE)
def test_the_epsilons_of_the_design(
    settings: dict[str, Any], updates: int, design: tuple[float, ...]
) -> None:
    trials = [upper(plan(**settings), updates / share) for share in (0.5, 0.4, 0.35)]
    claimed = upper(plan(**settings, accounting="published"), updates)
    whole = upper(plan(**settings, accounting="per-acceptance"), updates)
    assert [claimed, *trials, whole] == pytest.approx(design, rel=1.2e-2)
    assert claimed < min(trials) < whole


def test_the_published_number_says_that_it_is() -> None:
    printed = hush.epsilon(plan(accounting="published"), steps=10, delta=1e-5)
    assert printed.basis == "published"
    assert hush.epsilon(plan(), steps=10, delta=1e-5).basis == "proved"
    mixed = charge.compose({plan(accounting="published"): 1, plan(): 5}, 1e-5)
    assert mixed.basis == "published"
    claimed = hush.rdp(plan(accounting="published"), orders=[2, 8])
    composed = [SampledGaussian(2048 / RECORDS, 4.0), SampledGaussian(256 / RECORDS, 1.3)]
    assert claimed == pytest.approx(
        sum(gaussian.renyi_divergence(step, [2, 8]) for step in composed), rel=1e-12
    )


def test_the_summed_test_costs_two_gaussians_with_draws_of_their_own() -> None:
    chosen = plan(test="summed")
    parts = {SampledGaussian(2048 / RECORDS, 4.0): 500, SampledGaussian(256 / RECORDS, 1.3): 500}
    assert hush.epsilon(chosen, steps=500, delta=1e-5).epsilon == accountant.epsilon(parts, 1e-5)
    assert (
        upper(chosen, 500)
        > hush.epsilon(replace(chosen, release=hush.Always()), steps=500, delta=1e-5).epsilon.upper
    )


def test_the_summed_test_against_dp_accounting() -> None:
    from dp_accounting.pld import privacy_loss_distribution as peer

    release = hush.Selective(rate=0.05, clip=0.01, multiplier=1.0, test="summed")
    chosen = replace(plans.dpsgd(rate=0.1, multiplier=1.5), release=release)
    train = peer.from_gaussian_mechanism(1.5, sampling_prob=0.1, value_discretization_interval=1e-3)
    test = peer.from_gaussian_mechanism(1.0, sampling_prob=0.05, value_discretization_interval=1e-3)
    theirs = train.self_compose(40).compose(test.self_compose(40)).get_epsilon_for_delta(1e-5)
    ours = hush.epsilon(chosen, steps=40, delta=1e-5).epsilon
    assert ours.lower - 1e-3 <= theirs <= ours.upper + 2e-2


def test_hidden_trials_that_never_end_are_in_delta() -> None:
    chosen = plan(accounting="per-acceptance")
    assert isinstance(chosen.release, hush.Selective)
    lowest, _ = chosen.release.acceptance(256.0)
    assert (1 - lowest) ** chosen.release.most_trials <= GIVEN_UP
    tight = hush.epsilon(chosen, steps=100, delta=50 * GIVEN_UP).epsilon
    assert tight.upper == np.inf
