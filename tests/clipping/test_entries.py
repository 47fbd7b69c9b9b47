"""Histograms: what it costs that one record changes a few entries."""

import math

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import gamma

import hush
from hush.accounting.mechanism import Entrywise, mechanism
from hush.accounting.steps import SampledGaussian, SampledNoise
from hush.core.errors import InvalidValue, Unproved, Unsupported
from hush.core.parts import Noise


def histogram(noise: Noise, changed: int = 2, norm: float = 1.0) -> hush.Plan:
    return hush.Plan(
        sampling=hush.FullBatch(), clipping=hush.Entries(changed=changed, norm=norm), noise=noise
    )


def test_normal_noise_sees_the_euclidean_norm_of_the_change() -> None:
    by_entries = mechanism(histogram(hush.Gaussian(multiplier=4.0)))
    assert by_entries == SampledGaussian(1.0, 4.0 / math.sqrt(2))
    as_power = histogram(hush.GeneralizedGaussian(beta=2.0, multiplier=4.0 * math.sqrt(2)))
    assert mechanism(as_power).multiplier == pytest.approx(by_entries.multiplier)  # type: ignore[attr-defined]


@pytest.mark.parametrize("changed", [1, 2, 10])
def test_other_noise_costs_once_for_each_entry(changed: int) -> None:
    laplace = mechanism(histogram(hush.Laplace(multiplier=3.0), changed))
    assert laplace == Entrywise(SampledNoise(1.0, 1.0, 3.0), changed)
    plan = histogram(hush.GeneralizedGaussian(beta=1.5, multiplier=3.0), changed)
    single = histogram(hush.GeneralizedGaussian(beta=1.5, multiplier=3.0), 1)
    orders = [1.5, 2.0, 8.0]
    assert hush.rdp(plan, orders) == pytest.approx(changed * hush.rdp(single, orders))
    assert hush.epsilon(plan, steps=7, delta=1e-5) == hush.epsilon(single, steps=7 * changed, delta=1e-5)


@pytest.mark.parametrize("beta", [1.0, 1.5, 3.0])
def test_the_divergence_of_one_entry_by_integration(beta: float) -> None:
    scale, order = 2.0, 3.0
    constant = beta / (2 * scale * float(gamma(1 / beta)))

    def integrand(x: float) -> float:
        exponent = order * abs((x - 1) / scale) ** beta + (1 - order) * abs(x / scale) ** beta
        return constant * math.exp(-exponent)

    moment = quad(integrand, -60, 60, points=[0, 1], epsabs=1e-13, limit=500)[0]
    plan = histogram(hush.GeneralizedGaussian(beta=beta, multiplier=scale), changed=2)
    divergence = float(hush.rdp(plan, [order])[0])
    assert divergence == pytest.approx(2 * math.log(moment) / (order - 1), rel=1e-6)


def delta_of_two_entries(beta: float, scale: float, epsilon: float) -> float:
    """The hockey-stick divergence of two noisy counts, each moved by one: by a fine grid."""
    x = np.linspace(-12 * scale, 12 * scale + 1, 3001)
    density = np.exp(-(np.abs(x / scale) ** beta))
    density /= density.sum()
    moved = np.exp(-(np.abs((x - 1) / scale) ** beta))
    moved /= moved.sum()
    gap = np.multiply.outer(moved, moved) - math.exp(epsilon) * np.multiply.outer(density, density)
    return float(np.maximum(gap, 0.0).sum())


@pytest.mark.parametrize("beta", [1.0, pytest.param(1.5, marks=pytest.mark.slow), 3.0])
def test_two_entries_by_a_grid_in_two_dimensions(beta: float) -> None:
    from hush.accounting.epsilon import delta

    scale, epsilon = 1.5, 0.7
    truth = delta_of_two_entries(beta, scale, epsilon)
    noise = hush.GeneralizedGaussian(beta=beta, multiplier=scale)
    bound = delta({histogram(noise, changed=2): 1}, epsilon)
    assert bound.lower == 0, "what is released of the counts is a function of them"
    assert truth <= bound.upper * 1.001
    assert bound.upper == pytest.approx(truth, rel=5e-3)
    # What the paper's theorem charges, one count, is far below.
    assert delta({histogram(noise, changed=1): 1}, epsilon).upper < 0.7 * truth


def test_the_size_of_an_entry_cancels() -> None:
    noise = hush.Laplace(multiplier=3.0)
    assert mechanism(histogram(noise, norm=5.0)) == mechanism(histogram(noise))


def test_what_is_not_proved_is_refused() -> None:
    with pytest.raises(Unproved, match="Poisson x Entries x Gaussian"):
        hush.epsilon(
            hush.Plan(
                sampling=hush.Poisson(rate=0.1),
                clipping=hush.Entries(changed=2),
                noise=hush.Gaussian(multiplier=1.0),
            ),
            steps=1,
            delta=1e-5,
        )
    with pytest.raises(InvalidValue, match="changed=0 must be a whole number >= 1"):
        hush.Entries(changed=0)
    with pytest.raises(Unsupported, match="Train with L2 or Lp"):
        hush.Entries(changed=1).clip(None)  # type: ignore[arg-type]
    assert hush.Plan.from_plain(histogram(hush.Laplace(multiplier=1.0)).to_plain()) == histogram(
        hush.Laplace(multiplier=1.0)
    )
