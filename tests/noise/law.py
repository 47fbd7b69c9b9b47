"""Draws against SciPy's law."""

import math

import numpy as np
import numpy.typing as npt
from scipy import stats
from scipy.special import gamma


def deviations(values: npt.NDArray[np.float64], beta: float) -> npt.NDArray[np.float64]:
    """By how many standard errors the moments and the tails are off."""
    law, draws = stats.gennorm(beta), len(values)
    # |x|^beta has a gamma law, and so known moments of every power of |x|
    errors = [values.mean() / law.std() * math.sqrt(draws)]
    for power in (1, 2, 4):
        first = gamma((power + 1) / beta) / gamma(1 / beta)
        second = gamma((2 * power + 1) / beta) / gamma(1 / beta)
        mean = (np.abs(values) ** power).mean()
        errors.append((mean - first) * math.sqrt(draws / (second - first**2)))
    # up to where some fifty draws are expected beyond; for beta 1 that is eight scale units
    for chance in (0.9, 0.5, 0.1, 1e-2, 1e-3, 100 / draws):
        for side in (-1, 1):
            beyond = (side * values > law.isf(chance / 2)).sum()
            errors.append((beyond - draws * chance / 2) / math.sqrt(draws * chance / 2))
    return np.asarray(np.abs(errors))
