"""Which whole order decides the noise, and what orders between would ask for."""

import numpy as np
import pytest

import hush
from hush.core.guarantee import Budget
from hush_recipes.gg.beta_sgd import DELTA, Noise
from hush_recipes.gg.orders import best_order, least_scale, sampled_divergence

RATE, STEPS = 256 / 32_561, 1271


def plan(beta: float, scale: float) -> hush.Plan:
    return hush.Plan(
        sampling=hush.Poisson(RATE),
        clipping=hush.L2(1.0),
        noise=hush.GeneralizedGaussian(beta=beta, multiplier=scale),
    )


def test_the_integral_is_what_is_charged_at_whole_orders() -> None:
    """So the worst change that is charged is of one coordinate: spread changes cost no more."""
    orders = [2.0, 4.0, 5.0, 6.0]
    integrated = [sampled_divergence(3.0, 2.6, RATE, order) for order in orders]
    assert hush.rdp(plan(3.0, 2.6), orders) == pytest.approx(integrated, rel=1e-3)


@pytest.mark.parametrize(("beta", "scale", "order"), [(2.9091, 2.48, 5), (3.1818, 2.86, 4)])
def test_the_best_order_changes_and_fractional_ones_ask_for_less(
    beta: float, scale: float, order: float
) -> None:
    noise = Noise(plan(beta, scale), Budget(epsilon=4.0, delta=DELTA), STEPS, 0.0)
    assert best_order(noise) == order
    whole = least_scale(beta, 4.0, RATE, STEPS, np.array([4.0, 5.0]))
    assert whole == pytest.approx(scale, rel=1e-3)
    assert least_scale(beta, 4.0, RATE, STEPS, np.array([4.2, 4.5])) < 0.97 * whole
