"""The public questions: what a step costs, what many cost."""

import numpy as np
import pytest

import hush
from hush import plans
from hush.accounting.epsilon import compose, delta, epsilon, rdp
from hush.core.errors import InvalidValue


def plan(rate: float = 0.01, norm: float = 1.0, multiplier: float = 1.0) -> hush.Plan:
    return plans.dpsgd(rate=rate, clip_norm=norm, multiplier=multiplier)


def test_epsilon_is_a_full_statement() -> None:
    guarantee = epsilon(plan(), steps=10_000, delta=1e-5, dimension=10)
    assert guarantee.epsilon.lower <= 6.18775 + 1e-4
    assert guarantee.epsilon.upper == pytest.approx(6.18775, abs=1e-3)
    assert (guarantee.delta, guarantee.notion, guarantee.basis) == (1e-5, "dp", "proved")
    assert guarantee.neighbours is hush.Neighbours.ZERO_OUT
    assert not guarantee.sensitive


def test_steps_of_equal_plans_add_up_exactly() -> None:
    split = {plan(): 300, plan(norm=2.0): 700}
    assert compose(split, 1e-5) == epsilon(plan(), steps=1000, delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, float("nan")])
def test_delta_must_be_a_small_probability(delta: float) -> None:
    with pytest.raises(InvalidValue, match="delta="):
        epsilon(plan(), steps=1, delta=delta)


@pytest.mark.parametrize("rate", [0.01, 1.0])
def test_a_huge_loss_is_a_number(rate: float) -> None:
    guarantee = epsilon(plan(rate, multiplier=0.00229), steps=7_700_000, delta=1e-5)
    assert 1e9 < guarantee.epsilon.upper < 1e12


def generalized(
    noise: hush.Laplace | hush.GeneralizedGaussian, p: float, rate: float = 1.0
) -> hush.Plan:
    sampling = hush.FullBatch() if rate == 1 else hush.Poisson(rate)
    clipping = hush.L2(1.0) if p == 2 else hush.Lp(p=p, norm=1.0)
    return hush.Plan(sampling=sampling, clipping=clipping, noise=noise)


LAPLACE = hush.Laplace(3.0)
FLAT = hush.GeneralizedGaussian(beta=3.0, multiplier=5.0)


def test_no_steps_cost_nothing() -> None:
    nothing = epsilon(generalized(LAPLACE, 1), steps=0, delta=1e-5).epsilon
    assert nothing == hush.Bound(lower=0.0, upper=0.0)


def one_hot_delta(noise: hush.Laplace | hush.GeneralizedGaussian, rate: float, at: float) -> float:
    """The hockey-stick divergence of one step and a change in one coordinate, by integration."""
    plain = noise.to_plain()
    beta, scale = plain.get("beta", 1.0), plain["multiplier"]
    x = np.linspace(-40 * scale, 40 * scale + 1, 2_000_001)
    without, moved = (np.exp(-(np.abs((x - shift) / scale) ** beta)) for shift in (0.0, 1.0))
    weight = 1 / without.sum()
    present = (1 - rate) * without + rate * moved
    directions = ((present, without), (without, present))
    return float(max(np.maximum(a - np.exp(at) * b, 0).sum() * weight for a, b in directions))


@pytest.mark.parametrize(("noise", "p"), [(LAPLACE, 1), (FLAT, 2)])
@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_a_change_in_one_coordinate_is_covered_and_a_smaller_charge_is_not(
    noise: hush.Laplace | hush.GeneralizedGaussian, p: float, rate: float
) -> None:
    upper = epsilon(generalized(noise, p, rate), steps=1, delta=1e-3).epsilon.upper
    assert one_hot_delta(noise, rate, upper) <= 1e-3
    lower = epsilon(generalized(noise, p, rate), steps=1, delta=1e-3).epsilon.lower
    assert one_hot_delta(noise, rate, lower) >= 1e-3 * (1 - 1e-3)
    assert one_hot_delta(noise, rate, 0.2 * upper) > 1e-3, "the check would notice"


def test_plans_of_all_kinds_compose() -> None:
    counts = {plan(): 1000, generalized(LAPLACE, 1, rate=0.01): 100, generalized(FLAT, 2): 1}
    together = compose(counts, 1e-5).epsilon
    alone = compose({plan(): 1000}, 1e-5).epsilon
    assert alone.upper < together.lower < together.upper
    bound = delta(counts, together.upper)
    assert bound.lower <= bound.upper <= 1e-5 * (1 + 1e-9)


def test_an_l_p_above_two_needs_the_dimension_and_costs_more_in_a_larger_one() -> None:
    flat = generalized(hush.GeneralizedGaussian(beta=4.0, multiplier=3.0), 4)
    with pytest.raises(InvalidValue, match=r"needs the dimension.*clip with L2"):
        rdp(flat, [2.0])
    scalar, vector = (float(rdp(flat, [2.0], dimension=d)[0]) for d in (1, 1000))
    assert vector / scalar == pytest.approx(14.4, abs=0.05)


@pytest.mark.parametrize(
    ("beta", "multiplier"),
    [
        (50.0, 1e-3),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((12.0, 5e-3), (8.0, 1e-3))),
    ],
)
def test_too_little_noise_is_never_free(beta: float, multiplier: float) -> None:
    """Divergences beyond any number must not come out as NaN, and NaN not as nothing."""
    bare = generalized(hush.GeneralizedGaussian(beta=beta, multiplier=multiplier), 2, rate=0.1)
    assert not np.isnan(rdp(bare, [2.0, 3.0, 64.0], dimension=1)).any()
    assert epsilon(bare, steps=3, delta=1e-5, dimension=1).epsilon.upper > 1e5
    drawn = 1 - 0.9**3
    assert delta({bare: 3}, 0.0, dimension=1).upper == pytest.approx(drawn, rel=1e-3)
