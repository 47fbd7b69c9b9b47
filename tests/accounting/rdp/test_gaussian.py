"""Rényi divergences against 30-digit integrals, closed forms and dp-accounting."""

from itertools import pairwise

import mpmath as mp
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import rdp_privacy_accountant as peer

from hush.accounting.rdp.conversion import rdp_to_epsilon
from hush.accounting.rdp.gaussian import renyi_divergence
from hush.accounting.steps import SampledGaussian

ORDINARY = (1.5, 2, 3.7, 8, 16.5, 32, 64)


def integral(rate: float, multiplier: float, order: float, *, add: bool = False) -> float:
    """The divergence by 30-digit integration; shares nothing with hush but the definition."""
    with mp.workdps(30):
        q, s, a = mp.mpf(rate), mp.mpf(multiplier), mp.mpf(order)

        def excess(x: mp.mpf) -> mp.mpf:
            w = q * mp.expm1((2 * x - 1) / (2 * s * s))
            ratio = 1 / (1 + w) if add else 1 + w
            base = mp.npdf(x, 0, s) * (1 + w if add else 1)
            return base * (ratio**a - 1 - a * (ratio - 1))

        kink = s * s * mp.log(1 / q - 1) + 0.5 if q < 1 else mp.mpf(0)
        marks = {-20 * s, -5 * s, mp.mpf(0), 5 * s, a - 5 * s, a, a + 5 * s, a + 20 * s, kink}
        inside = sorted(mark for mark in marks if -20 * s <= mark <= a + 20 * s)
        return float(mp.log1p(mp.quad(excess, inside)) / (a - 1))


@pytest.mark.parametrize(
    ("rate", "multiplier", "order"),
    [
        (0.01, 1.0, 1.5),
        (0.01, 1.0, 2),
        (0.01, 1.0, 32),
        (0.01, 1.0, 32.5),
        (1e-5, 0.6, 3.3),
        (1e-5, 5.0, 1.01),
        (0.5, 0.4, 7.7),
        (0.2, 4.0, 100.5),
        (0.9, 10.0, 1.001),
        (1e-8, 2.0, 2.5),
        (0.05, 100.0, 64.5),
    ],
)
def test_the_integral(rate: float, multiplier: float, order: float) -> None:
    ours = float(renyi_divergence(SampledGaussian(rate, multiplier), order)[0])
    assert ours == pytest.approx(integral(rate, multiplier, order), rel=1e-9)
    assert ours >= integral(rate, multiplier, order, add=True) * (1 - 1e-9)


def test_a_multiplier_five_percent_off_would_be_seen() -> None:
    truth = integral(0.01, 1.0, 8.5)
    off = float(renyi_divergence(SampledGaussian(0.01, 1.05), 8.5)[0])
    assert off != pytest.approx(truth, rel=1e-2)


@pytest.mark.parametrize("multiplier", [1e-3, 0.5, 3.0, 1e6])
def test_closed_form_at_rate_one(multiplier: float) -> None:
    orders = np.array(ORDINARY)
    expected = orders / (2 * multiplier**2)
    assert renyi_divergence(SampledGaussian(1.0, multiplier), orders) == pytest.approx(
        expected, rel=1e-11
    )


@pytest.mark.parametrize(("rate", "multiplier"), [(0.01, 1.0), (0.2, 4.0), (1e-3, 0.6)])
def test_dp_accounting(rate: float, multiplier: float) -> None:
    step = SampledGaussian(rate, multiplier)

    def ours(orders: list[float]) -> float:
        return rdp_to_epsilon(1000 * renyi_divergence(step, orders), np.array(orders), 1e-5)

    orders: list[float] = [2, 3, 8, 16, 32, 64]
    accountant = peer.RdpAccountant(orders)
    event = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier))
    accountant.compose(event, 1000)
    assert ours(orders) == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-9)
    # At fractional orders dp-accounting 0.6 is above the integral: ours may only be lower.
    fractional = [1.25, 1.5, 2.5, 3.7, 16.5]
    peers = peer.RdpAccountant(fractional)
    peers.compose(event, 1000)
    assert ours(fractional) <= peers.get_epsilon(1e-5) * (1 + 1e-9)


@pytest.mark.parametrize("multiplier", [1e-300, 1e-3, 0.02, 1.0, 1e6, 1e300])
@pytest.mark.parametrize("rate", [1e-8, 0.3, 1.0])
def test_extremes_are_never_nan_and_never_fall_with_the_order(rate: float, multiplier: float) -> None:
    values = renyi_divergence(SampledGaussian(rate, multiplier), [1.0001, 1.5, 2, 2.5, 100, 1e5, 1e12])
    assert not np.isnan(values).any()
    assert (values >= 0).all()
    assert all(low <= high * (1 + 1e-9) + 1e-20 for low, high in pairwise(values))
