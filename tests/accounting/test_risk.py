"""Bounds on attacks, and noise for a risk, against closed forms, quadrature and sampling."""

import math
from typing import Any

import mpmath as mp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

import hush
from hush import plans
from hush.accounting.attacker import ApproximateDP, Attacker
from hush.core.errors import BudgetExceeded
from hush.noise import Gaussian

RISKS = [
    hush.Risk(tpr=0.05, fpr=0.01),
    hush.Risk(tpr=0.003, fpr=1e-3),
    hush.Risk(tpr=0.8, fpr=0.5),
    hush.Risk(advantage=0.1),
    hush.Risk(posterior=0.6, prior=0.5),
    hush.Risk(posterior=0.85, prior=0.2),
]


def plan(rate: float, multiplier: float = 1.0) -> hush.Plan:
    return plans.dpsgd(rate=rate, multiplier=multiplier)


def multiplier(private: hush.Plan) -> float:
    assert isinstance(private.noise, Gaussian)
    return private.noise.multiplier


def gaussian_accuracy(mu: float, prior: float) -> float:
    """The accuracy of the best guess between N(0, 1) and N(mu, 1), by the threshold that Bayes takes."""
    threshold = mu / 2 + math.log((1 - prior) / prior) / mu
    return float(prior * norm.sf(threshold - mu) + (1 - prior) * norm.cdf(threshold))


def gaussian_mu(risk: hush.Risk) -> float:
    """The distance of two unit normals at which the best test attains exactly the risk."""
    if risk.tpr is not None:
        return float(norm.isf(risk.fpr) - norm.isf(risk.tpr))
    if risk.advantage is not None:
        return float(2 * norm.ppf((1 + risk.advantage) / 2))
    assert risk.prior is not None
    assert risk.posterior is not None
    low, high = 1e-6, 20.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (
            (middle, high) if gaussian_accuracy(middle, risk.prior) < risk.posterior else (low, middle)
        )
    return low


@pytest.mark.parametrize("risk", RISKS, ids=str)
def test_without_sampling_the_noise_is_the_closed_form(risk: hush.Risk) -> None:
    exact = math.sqrt(50) / gaussian_mu(risk)
    found = multiplier(hush.calibrate(plan(1.0), risk, steps=50))
    assert exact * (1 - 1e-9) <= found <= exact * 1.002


@pytest.mark.few(3)
@pytest.mark.parametrize("risk", RISKS, ids=str)
def test_the_risk_is_kept_nearly_used_up_and_exceeded_with_less_noise(risk: hush.Risk) -> None:
    private = hush.calibrate(plan(0.05), risk, steps=300)
    attained = risk.attained(Attacker({private: 300}))
    limit = next(v for v in (risk.tpr, risk.advantage, risk.posterior) if v is not None)
    assert limit - 1.001e-3 * risk.max_gain <= attained <= limit
    noisy = plan(0.05, 0.99 * multiplier(private))
    assert risk.attained(Attacker({noisy: 300})) > limit


def best_accuracy(rate: float, scale: float, prior: float, members: bool) -> float:
    """Accuracy of the best guess after one step, by quadrature: `prior` is that of the first law."""
    mp.mp.dps = 25

    def density(x: Any, present: bool) -> Any:
        without = mp.npdf(x, 0, scale)
        return (1 - rate) * without + rate * mp.npdf(x, 1, scale) if present else without

    def correct(x: Any) -> Any:
        return max(prior * density(x, members), (1 - prior) * density(x, not members))

    odds = math.log((1 - prior) / prior) * (1 if members else -1)
    # where the likelihood ratio is as large as the odds, if it ever is
    ratio = (math.exp(odds) - (1 - rate)) / rate
    cut = [0.5 + scale**2 * math.log(ratio)] if ratio > 0 else []
    return float(mp.quad(correct, sorted([-12 * scale, *cut, 1 + 12 * scale, 0.0, 1.0])))


@pytest.mark.few(4)
@pytest.mark.parametrize("prior", [0.2, 0.5, 0.7])
@pytest.mark.parametrize(("rate", "scale"), [(0.3, 0.7), (0.1, 1.5), (0.9, 0.4)])
def test_the_posterior_of_one_sampled_step_against_quadrature(
    rate: float, scale: float, prior: float
) -> None:
    bound = Attacker({plan(rate, scale): 1}).posterior(prior)
    exact = max(best_accuracy(rate, scale, prior, members) for members in (True, False))
    assert exact * (1 - 1e-10) <= bound <= max(exact, prior, 1 - prior) * (1 + 2e-3)


@pytest.mark.few(4)
@pytest.mark.parametrize(("rate", "scale"), [(0.3, 0.7), (0.1, 1.5), (0.9, 0.4)])
@pytest.mark.parametrize("fpr", [1e-4, 0.01, 0.1])
def test_the_power_of_one_sampled_step_against_quantiles(rate: float, scale: float, fpr: float) -> None:
    threshold = scale * norm.isf(fpr)
    exact = (1 - rate) * fpr + rate * norm.sf((threshold - 1) / scale)
    bound = Attacker({plan(rate, scale): 1}).true_positive_rate(fpr)
    assert exact * (1 - 1e-12) <= bound
    # few false positives: the ratio of likelihoods is above 1, where that direction is the worse one
    assert bound <= exact * 1.005


@settings(max_examples=60, deadline=None)
@given(
    epsilon=st.floats(1e-3, 8),
    delta=st.floats(1e-9, 0.1),
    false_positives=st.floats(1e-6, 1),
    prior=st.floats(0.01, 0.99),
)
def test_a_bare_epsilon_is_attained_by_the_randomized_response_that_leaks(
    epsilon: float, delta: float, false_positives: float, prior: float
) -> None:
    # outcomes of both worlds: known to be in, leaning in, leaning out, known to be out
    share = (1 - delta) / (1 + math.exp(epsilon))
    inside = np.array([delta, 1 - delta - share, share, 0.0])
    outside = inside[::-1]
    bounds = ApproximateDP([(epsilon, delta)])
    x, y = np.append(0.0, np.cumsum(outside)), np.append(0.0, np.cumsum(inside))
    power = float(np.interp(false_positives, x[1:], y[1:]))
    assert power - 1e-12 <= bounds.true_positive_rate(false_positives) <= power + 1e-12
    assert bounds.advantage == pytest.approx(np.abs(inside - outside).sum() / 2, abs=1e-12)
    accuracy = np.maximum(prior * inside, (1 - prior) * outside).sum()
    assert bounds.posterior(prior) == pytest.approx(accuracy, abs=1e-12)


@pytest.mark.few(3)
@pytest.mark.parametrize("risk", RISKS, ids=str)
def test_the_budget_that_implies_a_risk_is_the_largest(risk: hush.Risk) -> None:
    budget = risk.budget(1e-5)
    assert risk.gain(ApproximateDP([(budget.epsilon, budget.delta)])) <= risk.max_gain
    more = hush.Budget(epsilon=budget.epsilon * 1.001, delta=1e-5)
    assert risk.gain(ApproximateDP([(more.epsilon, more.delta)])) > risk.max_gain
    # the way through epsilon is never the cheaper one
    direct, through = (hush.calibrate(plan(0.1), limit, steps=100) for limit in (risk, budget))
    assert multiplier(direct) <= multiplier(through)


def test_the_likelihood_ratio_attack_attains_the_risk_and_not_more() -> None:
    """The best attack there is, carried out on the calibrated plan, and on one with too little noise."""
    risk, steps, runs = hush.Risk(tpr=0.3, fpr=0.1), 20, 40_000
    scale = multiplier(hush.calibrate(plan(0.2), risk, steps=steps))

    def power(noise: float) -> float:
        random = np.random.default_rng(1)
        totals = []
        for member in (False, True):
            drawn = (random.random((steps, runs)) < 0.2) & member
            output = drawn + noise * random.standard_normal((steps, runs))
            ratio = np.log1p(0.2 * np.expm1((2 * output - 1) / (2 * noise**2))).sum(axis=0)
            totals.append(ratio)
        return float(np.mean(totals[1] > np.quantile(totals[0], 0.9)))

    # the threshold's false positives vary by .0015, and so the power by .004: four deviations
    assert 0.28 < power(scale) < 0.3 + 0.016
    assert power(0.7 * scale) > 0.3 + 0.016


def test_what_was_spent_and_who_is_protected_count() -> None:
    risk, first = hush.Risk(tpr=0.1, fpr=0.02), plan(1.0, 4.0)
    alone = hush.calibrate(plan(0.1), risk, steps=50)
    after = hush.calibrate(plan(0.1), risk, steps=50, spent={first: 1})
    assert multiplier(after) > 1.01 * multiplier(alone)
    assert Attacker({after: 50, first: 1}).true_positive_rate(0.02) <= 0.1
    three, limit = hush.Adjacency(group=3), hush.Risk(advantage=0.2)
    alone, together = (
        hush.calibrate(plan(0.1), limit, steps=50, adjacency=who) for who in (hush.Adjacency(), three)
    )
    assert Attacker({together: 50}, adjacency=three).advantage <= 0.2
    assert multiplier(together) > 2 * multiplier(alone)
    with pytest.raises(BudgetExceeded, match=r"times what a true positive rate of 0\.1 at 0\.02 false"):
        hush.calibrate(plan(0.1), risk, steps=50, spent={plan(1.0, 0.5): 1})


RATES = (1e-3, 0.01, 0.1, 0.3, 0.7)


def test_without_sampling_it_is_the_gaussian_trade_off() -> None:
    attacker = Attacker({plan(1.0, 10.0): 100})
    assert attacker.advantage == pytest.approx(2 * norm.cdf(0.5) - 1, rel=1e-9)
    for x in RATES:
        exact = norm.cdf(norm.isf(x) - 1.0)
        rate = attacker.false_negative_rate(x)
        assert rate <= exact * (1 + 1e-12)
        assert rate == pytest.approx(exact, rel=1e-4)


def test_the_curve_falls_and_is_consistent() -> None:
    attacker = Attacker({plan(0.2, 2.0): 10, plan(1.0, 20.0): 4})
    missed = [attacker.false_negative_rate(x) for x in (0.0, *RATES, 1.0)]
    assert missed == sorted(missed, reverse=True)
    assert missed[0] == pytest.approx(1.0, abs=1e-9)
    assert missed[-1] == 0.0
    for x, missed_rate in zip((0.0, *RATES, 1.0), missed, strict=True):
        assert 1 - missed_rate - x <= attacker.advantage + 1e-12
    assert attacker.success == (1 + attacker.advantage) / 2
