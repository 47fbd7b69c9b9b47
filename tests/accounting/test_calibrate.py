"""The least noise and the most steps a budget allows."""

from dataclasses import replace

import pytest

import hush
from hush import plans
from hush.accounting.calibrate import calibrate, max_steps
from hush.accounting.epsilon import compose, epsilon
from hush.accounting.pld import accountant
from hush.accounting.steps import SampledNoise
from hush.core.errors import BudgetExceeded, InvalidValue


def plan(rate: float = 0.01, multiplier: float = 1.0) -> hush.Plan:
    return plans.dpsgd(rate=rate, multiplier=multiplier)


@pytest.mark.parametrize(
    ("rate", "steps", "target", "delta"),
    [
        (0.01, 1000, 3.0, 1e-5),
        (0.001, 10_000, 1.0, 1e-6),
        (1.0, 100, 0.1, 1e-5),
        (0.2, 2000, 8.0, 1e-5),
        (1e-4, 100_000, 0.01, 1e-8),
        (0.5, 1, 20.0, 1e-5),
    ],
)
def test_the_budget_is_met_and_nearly_used_up(
    rate: float, steps: int, target: float, delta: float
) -> None:
    budget = hush.Budget(epsilon=target, delta=delta)
    private = calibrate(plan(rate), budget, steps=steps)
    upper = epsilon(private, steps=steps, delta=delta).epsilon.upper
    assert target * (1 - 1e-3) <= upper <= target
    assert (private.sampling, private.clipping) == (plan(rate).sampling, plan(rate).clipping)


@pytest.mark.parametrize(
    ("limit", "needless"),
    [
        (hush.Risk(tpr=0.05, fpr=0.01), True),
        (hush.Risk(tpr=0.03, fpr=0.01), False),
        (hush.Risk(advantage=0.03), True),
        (hush.Risk(advantage=0.02), False),
    ],
)
def test_a_risk_that_holds_without_noise_is_refused_at_once(limit: hush.Risk, needless: bool) -> None:
    """In 3 steps at rate 0.01 a record takes part with probability 0.0297."""
    if needless:
        with pytest.raises(InvalidValue, match="holds without any noise"):
            calibrate(plan(0.01), limit, steps=3)
    else:
        found = calibrate(plan(0.01), limit, steps=3)
        assert limit.gain(hush.Attacker({found: 3})) <= limit.max_gain


def test_an_impossible_budget_says_so() -> None:
    with pytest.raises(BudgetExceeded, match="Use fewer steps"):
        calibrate(plan(rate=1.0), hush.Budget(epsilon=1e-9, delta=1e-30), steps=10**9)


@pytest.mark.parametrize(("rate", "multiplier"), [(0.01, 1.0), (0.2, 6.0), (1.0, 30.0)])
def test_steps_within_is_the_last_that_fits(rate: float, multiplier: float) -> None:
    step, budget = plan(rate, multiplier), hush.Budget(epsilon=2.0, delta=1e-5)
    affordable = max_steps(step, budget)
    assert affordable > 0
    assert epsilon(step, steps=affordable, delta=1e-5).epsilon.upper <= 2.0
    assert epsilon(step, steps=affordable + 1, delta=1e-5).epsilon.upper > 2.0


def test_what_was_spent_counts() -> None:
    step, budget = plan(), hush.Budget(epsilon=2.0, delta=1e-5)
    affordable = max_steps(step, budget)
    assert max_steps(step, budget, spent={step: affordable - 10}) == 10
    assert max_steps(step, budget, spent={step: affordable}) == 0
    before = {plan(rate=1.0, multiplier=4.0): 2}
    after = max_steps(step, budget, spent=before)
    assert 0 < after < affordable
    assert compose({**before, step: after}, 1e-5).epsilon.upper <= 2.0


@pytest.mark.parametrize("beta", [1.0, 1.5, 2.0, 2.33, 4.0])
@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_the_scale_of_one_number_for_any_beta(beta: float, rate: float) -> None:
    plan = hush.Plan(
        sampling=hush.FullBatch() if rate == 1 else hush.Poisson(rate),
        clipping=hush.Lp(p=beta, norm=1.0),
        noise=hush.GeneralizedGaussian(beta=beta, multiplier=1.0),
    )
    budget = hush.Budget(epsilon=1.0, delta=1e-5)
    calibrated = hush.calibrate(plan, budget, steps=3, dimension=1)
    scale = calibrated.noise.to_plain()["multiplier"]
    # the certified distribution of the scalar mechanism meets the budget there and not with less noise
    assert accountant.epsilon({SampledNoise(rate, beta, scale): 3}, 1e-5).upper <= 1.0
    assert accountant.epsilon({SampledNoise(rate, beta, 0.99 * scale): 3}, 1e-5).lower > 1.0


@pytest.mark.slow
@pytest.mark.parametrize("beta", [1.5, 2.33, 4.0])
def test_the_scale_of_a_vector_for_any_beta(beta: float) -> None:
    own = hush.Plan(
        sampling=hush.FullBatch(),
        clipping=hush.Lp(p=beta, norm=1.0),
        noise=hush.GeneralizedGaussian(beta=beta, multiplier=1.0),
    )
    budget = hush.Budget(epsilon=1.0, delta=1e-5)
    scalar, vector = (hush.calibrate(own, budget, steps=3, dimension=d) for d in (1, 100))
    assert 0.998 < hush.epsilon(vector, steps=3, delta=1e-5, dimension=100).epsilon.upper <= 1.0
    ratio = vector.noise.to_plain()["multiplier"] / scalar.noise.to_plain()["multiplier"]
    # up to 2 the dimension hardly matters (what is left is Renyi's looseness); beyond, it does
    assert 1 <= ratio < 1.2 if beta <= 2 else ratio > 1.2


def test_steps_of_a_plan_that_needs_the_dimension() -> None:
    plan = hush.Plan(sampling=hush.Poisson(0.01), clipping=hush.Linf(0.1), noise=hush.Gaussian(30.0))
    for dimension in (100, {plan: 100}):
        budget = hush.Budget(epsilon=1.0, delta=1e-5)
        affordable = max_steps(plan, budget, dimension=dimension)
        assert hush.epsilon(plan, affordable, 1e-5, dimension=100).epsilon.upper <= 1.0
        assert hush.epsilon(plan, affordable + 1, 1e-5, dimension=100).epsilon.upper > 1.0


def test_noise_after_what_was_spent_is_larger_and_together_they_fit() -> None:
    sampled, budget = plan(rate=0.3), hush.Budget(epsilon=1.0, delta=1e-5)
    first = plan(1.0, 8.0)
    alone = calibrate(sampled, budget, 20)
    after = calibrate(sampled, budget, 20, spent={first: 2})
    multipliers = [float(calibrated.noise.to_plain()["multiplier"]) for calibrated in (alone, after)]
    assert multipliers[1] > 1.1 * multipliers[0]
    ledger = hush.Ledger()
    for step in (1, 2):
        ledger.charge(first, run="a", step=step, release=f"{step}")
    for step in range(1, 21):
        ledger.charge(after, run="b", step=step, release=f"{step}")
    assert 0.999 <= ledger.epsilon(1e-5).epsilon.upper <= 1.0
    # steps of the plan that comes out may be among those before it
    recalibrated = calibrate(after, budget, 5, spent={first: 2, after: 15})
    assert compose({first: 2, after: 15, recalibrated: 5}, 1e-5).epsilon.upper <= 1.0
    with pytest.raises(BudgetExceeded, match="already cost"):
        calibrate(sampled, budget, 20, spent={first: 20})


def test_a_dimension_is_not_taken_for_that_of_what_was_spent() -> None:
    """An earlier, larger model: counted with the later one's dimension, the budget would be exceeded."""
    first = hush.Plan(sampling=hush.FullBatch(), clipping=hush.Linf(1.0), noise=hush.Gaussian(300.0))
    with pytest.raises(InvalidValue, match="dimension"):
        calibrate(plan(), hush.Budget(epsilon=1.0, delta=1e-5), 20, dimension=10, spent={first: 1})
    later = replace(first, noise=hush.Gaussian(1.0))
    private = calibrate(later, hush.Budget(epsilon=1.0, delta=1e-5), 20, dimension=10, spent={plan(): 3})
    counts, sizes = {plan(): 3, private: 20}, {private: 10}
    assert 0.999 <= compose(counts, 1e-5, sizes).epsilon.upper <= 1.0
