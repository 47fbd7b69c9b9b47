"""P-values of the coins and noise of a private step under the laws that are charged, exact."""

import math

import numpy as np
import numpy.typing as npt
from scipy import stats

Array = npt.NDArray[np.float64]
_OFFSETS = 200
"""Number of distances at which pairs of records are compared, beside half of the records."""
_STAND_OUT = 1000
_FAR = 1.5
"""Sizes this many deviations from their mean are counted: where twice the variance shows best."""


def gamma_tails(total: float, draws: int, exponent: float) -> float:
    """P-value of a sum of |x|^exponent over draws of density ~ exp(-|x|^exponent): gamma, exactly."""
    law = stats.gamma(draws / exponent)
    return two_sided(law.cdf(total), law.sf(total))


def repeats(noise: Array) -> float:
    """P-value of noise whose entries are independent of each other, at any distance.

    Numbers of every two steps (rows) are compared at every distance along the row. For any symmetric
    law the products of signs at one distance are independent fair coins, exactly: each brings in a sign
    that those before it have not. All distances at once by Fourier transform.
    """
    steps, numbers = noise.shape
    shape = 2 * steps, 2 * numbers  # with zeros in between, so that nothing wraps around
    spectrum = np.fft.rfft2(np.where(noise < 0, -1.0, 1.0), shape)
    products = np.fft.irfft2(np.abs(spectrum) ** 2, shape)[:steps]
    lag = np.arange(2 * numbers)
    along = np.minimum(lag, 2 * numbers - lag)
    pairs = np.maximum(steps - np.arange(steps)[:, None], 0) * np.maximum(numbers - along, 0)
    pairs[0, 0] = 0  # each number with itself
    pairs[0, numbers:] = 0  # within a row a distance and its opposite are the same pairs
    compared = pairs > 0
    excess, thrown = products[compared].round(), pairs[compared]
    # exact for those that stand out most; the others count in the correction
    extreme = np.argsort(excess**2 / thrown)[-_STAND_OUT:]
    p_values = two_sided_coins((excess + thrown)[extreme] / 2, thrown[extreme], 0.5)
    return float(min(1.0, thrown.size * p_values.min(initial=1.0)))


def joint_draws(table: npt.NDArray[np.bool_], rate: float) -> float:
    """P-value of records (columns) that are drawn independently of each other.

    At each distance the records fall into disjoint pairs, in two ways; how many pairs are drawn together
    over all steps (rows) is binomial(pairs, rate^2), exactly.
    """
    records = table.shape[1]
    together, pairs = [], []
    for lag in sorted({*range(1, min(records, _OFFSETS + 1)), records // 2} - {0}):
        drawn_together = table[:, lag:] & table[:, :-lag]
        turn = np.arange(records - lag) // lag % 2
        for first in (0, 1):
            if (turn == first).any():
                together.append(drawn_together[:, turn == first].sum())
                pairs.append(len(table) * (turn == first).sum())
    return bonferroni(two_sided_coins(np.array(together), np.array(pairs), rate**2)) if pairs else 1.0


def sizes(counts: Array, thrown: int, rate: float) -> float:
    """P-value of how many of the counts are far from their mean, each of `thrown` coins: exact.

    Coins that depend on each other, in whatever pattern, spread more or less than independent ones.
    """
    law = stats.binom(thrown, rate)
    reach = _FAR * math.sqrt(thrown * rate * (1 - rate))
    low, high = math.ceil(thrown * rate - reach), math.floor(thrown * rate + reach)
    chance = float(law.cdf(low - 1) + law.sf(high))
    far = int(((counts < low) | (counts > high)).sum())
    return float(stats.binomtest(far, len(counts), chance).pvalue)


def coins(table: npt.NDArray[np.bool_], rate: float) -> float:
    """P-value of independent coins: their number, its spread over rows and over columns, and pairs."""
    if rate == 1:
        return float(table.all())
    number = float(stats.binomtest(int(table.sum()), table.size, rate).pvalue)
    spread = [sizes(table.sum(axis), table.shape[axis], rate) for axis in (0, 1)]
    return bonferroni(np.array([number, *spread, joint_draws(table, rate), joint_draws(table.T, rate)]))


def two_sided_coins(heads: Array, thrown: Array, rate: float) -> Array:
    """P-value of each number of heads among `thrown` coins."""
    law = stats.binom(thrown, rate)
    return np.asarray(np.minimum(1.0, 2 * np.minimum(law.cdf(heads), law.sf(heads - 1))))


def two_sided(below: float, above: float) -> float:
    """P-value from the probabilities of at most and at least the observed value."""
    return min(1.0, 2 * min(below, above))


def bonferroni(p_values: Array) -> float:
    """P-value of the smallest of several, whatever their dependence (Bonferroni)."""
    return min(1.0, float(p_values.size * p_values.min(initial=1.0)))
