"""Scores of answers by their frequency find the epsilon of a table of probabilities."""

import math

import numpy as np

from hush_recipes.audit.answers import by_frequency
from hush_recipes.audit.scores import Draws, epsilon_lower_bound


def test_frequencies_find_most_of_the_largest_ratio_and_no_more() -> None:
    rng = np.random.default_rng(2)
    votes = Draws(
        present=rng.choice([2.0, 7.0, 9.0], 4000, p=[0.6, 0.2, 0.2]),
        absent=rng.choice([2.0, 7.0, 9.0], 4000, p=[0.2, 0.2, 0.6]),
    )
    assert 0.8 < epsilon_lower_bound(by_frequency(votes), 1e-9, 0.95) < math.log(3)
