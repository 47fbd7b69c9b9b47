"""Plans that release the best of several runs: the law of the number of trials, and the charge."""

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy import optimize, stats

import hush
from hush import plans
from hush.accounting.epsilon import compose, delta
from hush.accounting.mechanism import mechanism
from hush.accounting.pld import accountant
from hush.accounting.selection import (
    _ORDERS,
    Profile,
    Selection,
    SelectionProfile,
    _profile,
    draw_trials,
    selection_rdp,
    trial_count,
)
from hush.accounting.steps import SampledGaussian
from hush.core.release import BestOf
from tests.accounting import selection_oracle as oracle
from tests.accounting.selection_oracle import Array
from tests.accounting.test_selection_bounds import LAWS, charged_law

ONE, MANY = plans.dpsgd(rate=1.0, multiplier=2.0), plans.dpsgd(rate=0.02, multiplier=1.5)


def selected(plan: hush.Plan, **settings: Any) -> hush.Plan:
    return replace(plan, release=hush.BestOf(**{"steps": 500, **settings}))


ORDERS: dict[str, Callable[[Array, float], Array]] = {
    "larger": lambda x, centre: stats.norm.cdf(x, centre),
    "smaller": lambda x, centre: stats.norm.sf(x, centre),
    "near": lambda x, centre: 1 - np.abs(stats.norm.cdf(x, centre) - stats.norm.cdf(-x, centre)),
    "far": lambda x, centre: np.abs(stats.norm.cdf(x, centre) - stats.norm.cdf(-x, centre)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kind", "shape", "mean"), LAWS)
def test_no_order_of_normal_outputs_reveals_more_than_is_charged(
    order: str, kind: str, shape: float, mean: float
) -> None:
    """The exact law of the released number, for scores that are functions of it."""
    plan = selected(ONE, steps=1, mean=mean, law=kind, shape=shape)
    pair = oracle.best_normal(0.5, oracle.law(kind, shape, mean), ORDERS[order])
    step = mechanism(plan)
    assert isinstance(step, Selection)
    for epsilon in (0.1, 0.5, 1.0, 2.0, 3.0):
        exact = oracle.delta(*pair, epsilon)
        assert exact <= step.delta_upper(epsilon) + 1e-9
        if order == "larger" and epsilon < 2:
            assert exact > delta({ONE: 1}, epsilon).upper, "one trial's charge would be too little"


def test_the_rdp_is_that_of_dp_accounting() -> None:
    """Theorem 2 of Papernot and Steinke, where nothing is known of the profile."""
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.5)), 500
    )
    nothing = Profile(np.array([0.0, 1.0]), np.ones(2))
    step = SampledGaussian(0.02, 1.5)
    for shape, mean in ((0.0, 10.0), (1.0, 10.0), (2.5, 40.0)):
        accountant_of_theirs = RdpAccountant(list(_ORDERS))
        accountant_of_theirs.compose(RepeatAndSelectDpEvent(event, mean, shape))
        law = charged_law("negative-binomial", shape, mean)
        unknown = SelectionProfile(nothing, np.ones(1), np.array([np.inf]))
        ours = selection_rdp(_ORDERS, lambda orders: 500 * step.rdp(orders), unknown, law)
        # theirs takes the smallest over all higher orders
        assert np.minimum.accumulate(ours[::-1])[::-1] == pytest.approx(
            accountant_of_theirs._rdp, rel=1e-6
        )


@pytest.mark.parametrize(("kind", "shape", "mean"), LAWS)
def test_the_charge_is_below_that_of_dp_accounting(kind: str, shape: float, mean: float) -> None:
    event = dp_accounting.SelfComposedDpEvent(
        dp_accounting.PoissonSampledDpEvent(0.02, dp_accounting.GaussianDpEvent(1.5)), 500
    )
    theirs = RdpAccountant()
    theirs.compose(RepeatAndSelectDpEvent(event, mean, np.inf if kind == "poisson" else shape))
    ours = hush.epsilon(selected(MANY, mean=mean, law=kind, shape=shape), 1, 1e-5)
    assert hush.epsilon(MANY, 500, 1e-5).epsilon.lower < ours.epsilon.upper
    assert ours.epsilon.upper < theirs.get_epsilon(1e-5)


def test_a_score_costs_what_a_held_out_record_tells_and_not_on_top() -> None:
    free = hush.epsilon(selected(MANY), 1, 1e-5).epsilon.upper
    noisy = hush.epsilon(selected(MANY, score=10.0), 1, 1e-5).epsilon.upper
    exposed = hush.epsilon(selected(MANY, score=0.5), 1, 1e-5).epsilon.upper
    assert free == pytest.approx(noisy, rel=1e-6)
    assert exposed > 2 * free


def test_the_profile_of_a_trial_is_the_accountants() -> None:
    counts = {SampledGaussian(0.02, 1.5): 500}
    epsilons = np.linspace(0, 2.5, 128)
    uppers = accountant.profile_upper(counts, list(epsilons))
    for epsilon, upper in zip(epsilons[::6], uppers[::6], strict=True):
        bound = accountant.delta(counts, float(epsilon))
        assert bound.lower <= upper <= 1.03 * bound.upper
    step = mechanism(selected(MANY))
    assert isinstance(step, Selection)
    between = float(_profile(step.trials, step.number).trial(np.array(1.2345)))
    assert (
        accountant.delta(counts, 1.2345).lower
        <= between
        <= 1.02 * accountant.delta(counts, 1.2345).upper
    )


@pytest.mark.parametrize(("kind", "shape", "mean"), LAWS)
def test_weights_are_the_derivative_of_the_generating_function(
    kind: str, shape: float, mean: float
) -> None:
    exact, law = oracle.law(kind, shape, mean), charged_law(kind, shape, mean)
    assert law.mean == pytest.approx(mean, rel=1e-9)
    better = np.linspace(0, 1, 50)
    assert law.weight(better) == pytest.approx(exact.derivative(1 - better), rel=1e-6)


@pytest.mark.parametrize(("kind", "shape", "mean"), LAWS)
def test_what_is_drawn_is_what_is_charged(kind: str, shape: float, mean: float) -> None:
    """And a law of a mean 30% larger would not pass."""
    law, pick = charged_law(kind, shape, mean), Random(5)
    drawn = np.array([draw_trials(law, pick.randrange) for _ in range(4000)])

    def fits(probabilities: oracle.Array) -> float:
        padded = np.append(probabilities, np.zeros(26))
        expected = np.append(padded[:25], padded[25:].sum()) * len(drawn)
        seen = np.bincount(np.minimum(drawn, 26), minlength=27)[1:]
        common = expected > 5
        counts = (
            np.append(seen[common], seen[~common].sum()),
            np.append(expected[common], max(expected[~common].sum(), 1e-3)),
        )
        return float(stats.chisquare(counts[0], counts[1] * counts[0].sum() / counts[1].sum()).pvalue)

    assert fits(oracle.law(kind, shape, mean).probabilities) > 1e-3
    assert fits(oracle.law(kind, shape, 1.3 * mean).probabilities) < 1e-6


def test_the_largest_uniform_number_ends_the_draw() -> None:
    for law in (BestOf(steps=1, mean=100.0), BestOf(steps=1, law="poisson", mean=100.0)):
        assert 100 < draw_trials(trial_count(law), lambda limit: limit - 1) < 20_000
        assert draw_trials(trial_count(law), lambda _: 0) == 1


def best_attack(mu: float, number: oracle.Law, epsilon: float) -> float:
    """Largest delta of three-part orders of a normal output: large outputs, small ones, the others.

    The event is that a small output is released.
    """
    large, small = np.meshgrid(np.linspace(-6, 9, 301), np.linspace(-6, 9, 301))

    def chance(centre: float) -> Array:
        above, below = stats.norm.sf(large, centre), stats.norm.cdf(small, centre)
        rest = np.clip(1 - above - below, 0.0, 1.0)
        return np.asarray(number.generating(1 - above) - number.generating(rest))

    return float(np.where(small <= large, chance(0.0) - np.exp(epsilon) * chance(mu), 0.0).max())


@pytest.mark.parametrize(("kind", "shape", "mean"), [LAWS[0], LAWS[3], LAWS[5]])
@pytest.mark.parametrize("multiplier", [3000.0, 1000.0, 100.0, 10.0])
def test_nearly_equal_trials_are_charged_what_an_attack_finds(
    multiplier: float, kind: str, shape: float, mean: float
) -> None:
    """A grid with cells of 2% would charge an epsilon of at least 0.002 to 0.01."""
    plan = selected(
        plans.dpsgd(rate=1.0, multiplier=multiplier), steps=1, mean=mean, law=kind, shape=shape
    )
    number = oracle.law(kind, shape, mean)
    found = optimize.brentq(lambda x: best_attack(1 / multiplier, number, x) - 1e-5, 0.0, 3.0)
    charged = hush.epsilon(plan, 1, 1e-5).epsilon
    assert charged.lower <= found <= charged.upper <= 1.2 * found


def test_one_run_is_the_lower_end_of_a_selection() -> None:
    """With a constant score the winner has the law of one run."""
    one, selection = hush.epsilon(MANY, 500, 1e-5).epsilon, hush.epsilon(selected(MANY), 1, 1e-5).epsilon
    assert selection.lower == one.lower
    both = compose({selected(MANY): 2, MANY: 100}, 1e-5).epsilon
    assert both.lower == hush.epsilon(MANY, 1100, 1e-5).epsilon.lower


def test_a_search_with_little_noise_has_a_cost_and_no_error() -> None:
    release = hush.BestOf(steps=1, mean=1000, law="poisson")
    plan = hush.Plan(
        sampling=hush.FullBatch(),
        clipping=hush.L2(1.0),
        noise=hush.Gaussian(0.02),
        release=release,
    )
    search = hush.epsilon(plan, 1, 1e-5).epsilon
    assert hush.epsilon(replace(plan, release=hush.Always()), 1, 1e-5).epsilon.lower <= search.upper
