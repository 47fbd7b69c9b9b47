"""The public questions: what a step costs, what many cost."""

import numpy as np
import pytest

import hush
from hush.accounting.charge import epsilon, rdp, spent
from hush.core.errors import InvalidValue


def plan(rate: float = 0.01, norm: float = 1.0, multiplier: float = 1.0) -> hush.Plan:
    return hush.Plan(
        sampling=hush.Poisson(rate=rate),
        clipping=hush.L2(norm=norm),
        noise=hush.Gaussian(multiplier=multiplier),
    )


def test_epsilon_is_a_full_statement() -> None:
    found = epsilon(plan(), steps=10_000, delta=1e-5, dimension=10)
    assert found.epsilon.lower <= 6.18775 + 1e-4
    assert found.epsilon.upper == pytest.approx(6.18775, abs=1e-3)
    assert (found.delta, found.notion, found.basis) == (1e-5, "dp", "proved")
    assert found.neighbours is hush.Neighbours.ADD_REMOVE
    assert not found.sensitive


def test_no_steps_cost_nothing() -> None:
    assert epsilon(plan(), steps=0, delta=1e-5).epsilon == hush.Bound(lower=0.0, upper=0.0)
    assert spent({}, 1e-5).epsilon == hush.Bound(lower=0.0, upper=0.0)


def test_steps_of_equal_plans_add_up_exactly() -> None:
    split = {plan(): 300, plan(norm=2.0): 700}
    assert spent(split, 1e-5) == epsilon(plan(), steps=1000, delta=1e-5)


def test_steps_of_different_plans_compose() -> None:
    cheap, dear = plan(multiplier=2.0), plan(multiplier=0.8)
    mixed = spent({cheap: 500, dear: 500}, 1e-5).epsilon
    assert epsilon(cheap, steps=1000, delta=1e-5).epsilon.upper < mixed.lower
    assert mixed.upper < epsilon(dear, steps=1000, delta=1e-5).epsilon.lower


@pytest.mark.parametrize("steps", [-1, 1.5, float("nan"), "many", True])
def test_steps_must_be_whole(steps: object) -> None:
    with pytest.raises(InvalidValue, match="whole number >= 0"):
        epsilon(plan(), steps=steps, delta=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, float("nan")])
def test_delta_must_be_a_small_probability(delta: float) -> None:
    with pytest.raises(InvalidValue, match="delta="):
        epsilon(plan(), steps=1, delta=delta)


def test_rdp_has_one_value_per_order() -> None:
    values = rdp(plan(), orders=[2, 2.5, 64], dimension=3)
    assert values.shape == (3,)
    assert (np.diff(values) > 0).all()
    assert rdp(plan(norm=9.0), [2]) == rdp(plan(), [2])
