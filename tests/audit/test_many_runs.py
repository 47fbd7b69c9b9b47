"""Bounds from many runs against normal noise, whose curve is known."""

import numpy as np
import pytest
from scipy.special import ndtri

from hush.accounting.pld import analytic_gaussian
from hush.audit.lower_bound import many_runs, separation_lower
from hush.core.errors import DataError


def test_the_curve_is_found_and_not_exceeded_unless_noise_is_missing() -> None:
    rng = np.random.default_rng(0)
    true = analytic_gaussian.epsilon(1.0, 1e-5).upper
    sound, broken = [], []
    for _ in range(100):
        outside = rng.normal(size=1000)
        sound.append(many_runs(1 + rng.normal(size=1000), outside, delta=1e-5))
        broken.append(many_runs(1 + rng.normal(size=1000) / 4, outside / 4, delta=1e-5))
    assert sum(bound.separation > 1.0 for bound in sound) <= 8
    assert sum(bound.gaussian_epsilon > true for bound in sound) <= 8
    assert sum(bound.epsilon > true for bound in sound) == 0
    assert np.median([bound.separation for bound in sound]) > 0.7
    assert all(bound.gaussian_epsilon > true for bound in broken)


def test_the_separation_of_counts() -> None:
    near = separation_lower(8413, 10_000, 1587, 10_000, 0.95)
    assert 1.9 < near < ndtri(0.8413) - ndtri(0.1587)
    assert separation_lower(0, 10, 0, 10, 0.95) == 0.0
    assert separation_lower(5, 10, 10, 10, 0.95) == 0.0
    with pytest.raises(DataError, match="at least 8"):
        many_runs([1.0] * 9, [1.0], delta=1e-5)
