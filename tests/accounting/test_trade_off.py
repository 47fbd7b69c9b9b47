"""The trade-off curve and mu of Gaussian DP: closed forms, other libraries, and a mu too small."""

import functools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_gaussian_mechanism
from gdpnum.converter import PLDConverter
from riskcal.analysis import get_advantage_from_pld, get_bayes_risk_from_pld, get_beta_from_pld
from scipy.stats import norm

import hush
from hush import plans
from hush.accounting.attacker import Attacker
from hush.accounting.explanation import (
    MIN_ERROR_RATE,
    PrivacyProfile,
    explain,
    gaussian_mu,
    privacy_profile,
    trade_off_curve,
)
from hush.accounting.numerics import Array
from hush.accounting.pld import accountant, analytic_gaussian
from hush.accounting.pld.compose import compose


def plan(rate: float, multiplier: float) -> hush.Plan:
    return plans.dpsgd(rate=rate, multiplier=multiplier)


@functools.cache  # many tests ask of the same runs
def profile_of(rate: float, multiplier: float, steps: int) -> PrivacyProfile:
    return privacy_profile({plan(rate, multiplier): steps})


@functools.cache
def peer(rate: float, multiplier: float, steps: int) -> PrivacyLossDistribution:
    one = from_gaussian_mechanism(
        multiplier, sampling_prob=rate, use_connect_dots=True, value_discretization_interval=1e-4
    )
    return one.self_compose(steps)


def best_powers(loss: PrivacyLossDistribution, rates: Array) -> Array:
    """The largest true positive rate at each false positive rate, from the other library's deltas."""
    epsilons = np.linspace(0, 20, 1001)
    deltas = np.array(loss.get_delta_for_epsilon(epsilons))
    powers: Array = (deltas[:, None] + np.exp(epsilons)[:, None] * rates).min(axis=0)
    return powers


FEW_STEPS = [(0.25, 3.0, 200), (1.0, 10.0, 100), (0.5, 2.0, 20)]


@pytest.mark.parametrize("mu", [0.05, 1.0, 4.0])
def test_the_gaussian_mechanism_is_its_own_gaussian_dp(mu: float) -> None:
    curve = trade_off_curve(privacy_profile({plan(1.0, 1 / mu): 1}))
    assert mu <= curve.mu <= mu * 1.002
    rates = np.array(curve.false_positive_rates)
    exact = norm.cdf(norm.isf(rates) - mu)
    assert (np.array(curve.lower) <= exact + 1e-12).all()
    np.testing.assert_allclose(curve.lower, exact, atol=4e-3)


@pytest.mark.parametrize(("rate", "multiplier", "steps"), [*FEW_STEPS, (0.01, 1.0, 1000), (0.3, 0.5, 1)])
def test_the_gaussian_is_below_the_curve(rate: float, multiplier: float, steps: int) -> None:
    curve = trade_off_curve(profile_of(rate, multiplier, steps))
    inside = np.array(curve.false_positive_rates) >= 1e-6
    assert (np.array(curve.gaussian)[inside] <= np.array(curve.lower)[inside] + 1e-12).all()
    attacker = Attacker({plan(rate, multiplier): steps})
    for x in (1e-3, 0.05, 0.4):
        at_x = np.interp(x, curve.false_positive_rates, curve.lower)
        assert at_x == pytest.approx(attacker.false_negative_rate(x), abs=5e-3)


@pytest.mark.parametrize(("rate", "multiplier", "steps"), [*FEW_STEPS, (0.01, 1.0, 1000), (0.1, 0.5, 9)])
def test_no_smaller_mu_holds(rate: float, multiplier: float, steps: int) -> None:
    profile = profile_of(rate, multiplier, steps)
    mu = gaussian_mu(profile)
    # delta of mu-GDP is above what is certain of delta at every epsilon, but for the rarest tests
    for epsilon, lower in zip(profile.epsilons, profile.lower, strict=True):
        allowed = analytic_gaussian.delta(mu, epsilon).upper + MIN_ERROR_RATE * (1 + math.exp(epsilon))
        assert lower <= allowed
    smaller = [analytic_gaussian.delta(0.98 * mu, epsilon).upper for epsilon in profile.epsilons]
    assert any(lower > delta for lower, delta in zip(profile.lower, smaller, strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize(("rate", "multiplier", "steps"), FEW_STEPS)
def test_other_libraries_agree_where_steps_are_few(rate: float, multiplier: float, steps: int) -> None:
    loss, attacker = peer(rate, multiplier, steps), Attacker({plan(rate, multiplier): steps})
    for x in (1e-3, 0.01, 0.1, 0.5):
        assert attacker.false_negative_rate(x) == pytest.approx(
            get_beta_from_pld(loss, alpha=x), rel=5e-4
        )
    assert attacker.advantage == pytest.approx(get_advantage_from_pld(loss), rel=1e-3)
    for prior in (0.5, 0.6, 0.75):
        right = 1 - get_bayes_risk_from_pld(loss, prior)
        assert attacker.posterior(prior) == pytest.approx(right, rel=1e-3)
    curve = trade_off_curve(profile_of(rate, multiplier, steps))
    rates = np.geomspace(1e-10, 0.3, 50)
    mus = norm.isf(rates) - norm.isf(best_powers(loss, rates))
    assert curve.mu == pytest.approx(mus.max(), rel=1e-3)
    assert 0.98 * curve.mu <= PLDConverter(loss).get_mu() <= curve.mu


@pytest.mark.parametrize(
    ("rate", "multiplier", "steps"),
    [pytest.param(0.01, 1.0, 10_000, marks=pytest.mark.slow), (0.001, 0.6, 100_000)],
)
def test_many_steps_against_the_profile_of_another_library(
    rate: float, multiplier: float, steps: int
) -> None:
    loss, attacker = peer(rate, multiplier, steps), Attacker({plan(rate, multiplier): steps})
    rates = np.array([1e-6, 1e-3, 0.01, 0.1])
    for x, power in zip(rates, best_powers(loss, rates), strict=True):
        assert attacker.true_positive_rate(x) == pytest.approx(power, rel=1e-3)
        # riskcal joins two lattices that are each rounded outward, and so says too little
        assert 1 - get_beta_from_pld(loss, alpha=x) < power


def test_a_profile_that_is_loose_at_epsilon_zero_is_mended_by_its_other_points() -> None:
    """Of a selection nothing is known near epsilon 0, and its best attack is bounded all the same."""
    selection = replace(plan(0.2, 6.0), release=hush.BestOf(steps=100, mean=10.0))
    guarantee = hush.epsilon(selection, steps=1, delta=1e-5)
    meaning, loose = explain(guarantee, {selection: 1}), Attacker({selection: 1})
    epsilons, deltas = np.array(meaning.profile.epsilons), np.array(meaning.profile.upper)
    # randomized response has both errors alike, and no mechanism with that point does better
    alike = ((1 - deltas) / (1 + np.exp(epsilons))).max()
    assert meaning.attack.advantage == pytest.approx(1 - 2 * alike, abs=1e-9)
    assert meaning.attack.advantage < 0.7 * loose.advantage
    assert meaning.attack.posterior == pytest.approx((1 + meaning.attack.advantage) / 2)


@pytest.mark.parametrize(
    ("rate", "multiplier", "steps"), [(0.01, 1.0, 1000), (0.001, 0.5, 20), (1e-4, 0.4, 10)]
)
def test_rates_from_the_profile_are_those_of_a_search(
    rate: float, multiplier: float, steps: int
) -> None:
    run = plan(rate, multiplier)
    attack = explain(hush.epsilon(run, steps, 1e-5), {run: steps}).attack
    searched = Attacker({run: steps})
    assert attack.advantage == pytest.approx(searched.advantage, rel=1e-9)
    for x, power in zip((0.1, 0.01, 0.001), attack.true_positive_rates, strict=True):
        assert power == pytest.approx(searched.true_positive_rate(x), rel=1e-3)


def test_a_rare_record_is_explained_by_few_compositions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The direction that does not decide took most of half a minute."""
    composed = []

    def counted(parts: Any, window: Any) -> Any:
        composed.append(window)
        return compose(parts, window)

    monkeypatch.setattr(accountant, "compose", counted)
    rare = plan(1e-9, 1.0)
    meaning = explain(hush.epsilon(rare, 100, 1e-5), {rare: 100})
    assert len(composed) < 150, "474 before"
    assert 0 < meaning.attack.advantage <= 1e-7
