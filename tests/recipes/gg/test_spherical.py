"""Spherical noise: its delta against known formulas and simulation, and its limit, the Gaussian."""

import math

import numpy as np
import pytest
from scipy.stats import norm

from hush_recipes.gg.spherical import least_deviation, spherical_delta


@pytest.mark.parametrize("dimension", [3, 7, 1000])
def test_beta_two_is_gaussian_noise_in_every_dimension(dimension: int) -> None:
    deviation, epsilon = 1.5, 0.7
    inside, outside = 0.5 / deviation - epsilon * deviation, -0.5 / deviation - epsilon * deviation
    expected = norm.cdf(inside) - math.exp(epsilon) * norm.cdf(outside)  # Balle and Wang 2018
    found = spherical_delta(deviation * math.sqrt(2), 2.0, dimension, epsilon)
    assert found == pytest.approx(expected, rel=1e-3)


def test_beta_one_is_pure_in_all_dimensions() -> None:
    assert spherical_delta(1.001, 1.0, 5, 1.0) == pytest.approx(0, abs=1e-12)
    assert spherical_delta(0.9, 1.0, 5, 1.0) > 1e-6


def test_delta_against_simulation() -> None:
    scale, beta, dimension, epsilon = 1.3, 1.5, 4, 0.4
    rng = np.random.default_rng(0)
    directions = rng.standard_normal((400_000, dimension))
    radii = scale * rng.gamma(dimension / beta, size=(400_000, 1)) ** (1 / beta)
    x = radii * directions / np.linalg.norm(directions, axis=1, keepdims=True)
    moved = np.linalg.norm(x - np.eye(dimension)[0], axis=1)
    losses = (moved**beta - radii[:, 0] ** beta) / scale**beta
    expected = np.maximum(0, -np.expm1(epsilon - losses)).mean()
    assert spherical_delta(scale, beta, dimension, epsilon) == pytest.approx(expected, rel=1e-2)


def test_in_high_dimension_every_shape_needs_the_gaussians_deviation() -> None:
    gaussian = least_deviation(2.0, 1000)
    assert gaussian == pytest.approx(3.7306, rel=1e-4)
    for beta in (1.0, 1.5):
        assert least_deviation(beta, 3) < 0.75 * gaussian
        assert 0.99 * gaussian < least_deviation(beta, 1000) < gaussian
