"""One run with many canaries, each in or out by a fair coin: the trade-off curves that guesses refute.

After Steinke, Nasr and Jagielski 2023, and Mahloujifar, Melis and Chaudhuri 2024 (f-DP). Proved in
docs/guarantees/audit-canaries.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from hush.accounting.pld import analytic_gaussian
from hush.audit.lower_bound import CONFIDENCE
from hush.core.errors import DataError, InvalidValue
from hush.core.guarantee import DELTA
from hush.core.value import check_count

# Finer than what chance leaves of any such bound.
_STEP = 0.01
_STRIDE = 50
_LARGEST = 30.0
_UNIT = NormalDist()

InverseCurve = Callable[[float], float]
"""Smallest false positive rate at which a trade-off curve allows a true positive rate."""


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Number of guesses about canaries, the surest ones, and how many of them were right."""

    canaries: int
    made: int
    right: int


@dataclass(frozen=True, kw_only=True)
class OneRun:
    """What the guesses of one run refute, with the confidence asked for."""

    epsilon: float
    """No (epsilon, delta) guarantee below this holds, whatever the mechanism."""
    separation: float
    """No Gaussian trade-off curve nearer than this holds."""
    gaussian_epsilon: float
    """Epsilon of that curve at delta: an estimate, unless the noise is normal and nothing is sampled."""
    guesses: Guesses
    """Those that the epsilon is from."""


def surest_guesses(scores: npt.ArrayLike, included: npt.ArrayLike, made: int) -> Guesses:
    """Call the highest scores in and the lowest out, `made` of them in all; abstain from the others.

    How many are called is fixed beforehand, which the proof asks for.
    """
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if values.ndim != 1 or values.shape != truth.shape or not len(values):
        raise DataError(
            f"scores of shape {values.shape} and coins of shape {truth.shape}: each canary has one of "
            "each. Pass two lists of the same length."
        )
    if np.isnan(values).any():
        raise DataError("a canary's score is no number: it can be called neither in nor out.")
    made = check_count("made", made, "guesses are counted", at_least=1)
    if made > len(values):
        raise InvalidValue(f"made={made} must be at most the {len(values)} canaries.", key="made")
    order = np.argsort(-values, kind="stable")
    high = (made + 1) // 2
    right = int(truth[order[:high]].sum() + (~truth[order[len(order) - made + high :]]).sum())
    return Guesses(canaries=len(values), made=made, right=right)


def one_run(
    scores: npt.ArrayLike,
    included: npt.ArrayLike,
    *,
    delta: float,
    confidence: float = 0.95,
    shares: Sequence[float] = (0.125, 0.25, 0.5, 1.0),
) -> OneRun:
    """Lower bounds from the scores of canaries and the coins that put them in or left them out.

    **Guarantee.** If each coin was fair and on its own, and all that the scores were made of satisfies
    (epsilon, delta) for adding or removing one canary, then `epsilon` of the result is above that
    epsilon with probability at most 1 - confidence. Each share of guesses is tested at its part of that.
    """
    DELTA["range"].check("delta", delta)
    level = (1 - CONFIDENCE.check("confidence", confidence)) / len(shares)
    canaries = np.asarray(scores).size
    guesses = [surest_guesses(scores, included, max(1, round(share * canaries))) for share in shares]

    bounds = [
        _largest_refuted(some, level, lambda epsilon: approximate_dp_curve(epsilon, delta))
        for some in guesses
    ]
    separation = max(_largest_refuted(some, level, gaussian_curve) for some in guesses)
    return OneRun(
        epsilon=max(bounds),
        separation=separation,
        gaussian_epsilon=analytic_gaussian.epsilon(separation, delta).lower,
        guesses=guesses[bounds.index(max(bounds))],
    )


def _largest_refuted(guesses: Guesses, level: float, curve: Callable[[float], InverseCurve]) -> float:
    """The last of a fixed grid of epsilons or separations whose curve is refuted, 0 if none is.

    The grid is walked from below, in strides and then in steps, up to the first that is not refuted. A
    bound above the truth then means that the first stride or the first step above the truth was refuted,
    which holds there as well. Both rejections are of the form "at least so many right", so that one
    contains the other: no more than one chance of error, and no monotony of the test is needed.
    """
    last = 0
    for stride in (_STRIDE, 1):
        while last + stride <= _LARGEST / _STEP and refutes_curve(
            guesses, level, curve((last + stride) * _STEP)
        ):
            last += stride
    return last * _STEP


def refutes_curve(guesses: Guesses, level: float, inverse: InverseCurve) -> bool:
    """Whether as many right guesses have a chance of less than `level` under a trade-off curve.

    Suppose the chance of `right` or more is `level`. Going down from there, the curve bounds from below
    how likely fewer right guesses must be; if all of them together need more than 1, it was not.
    """
    made, canaries = guesses.made, guesses.canaries
    hits = guesses.right * level / canaries
    misses = (made - guesses.right) * level / canaries
    for count in range(guesses.right - 1, -1, -1):
        # the wrong guesses, weighed by their number, that the next right ones need at least
        needed = inverse(min(1.0, hits))
        if needed > misses:
            hits += count / (made - count) * (needed - misses)
            misses = needed
        if hits + misses > made / canaries:
            return True
    return hits + misses > made / canaries


def approximate_dp_curve(epsilon: float, delta: float) -> InverseCurve:
    """Inverse of the trade-off curve of (epsilon, delta)-DP."""

    def inverse(true: float) -> float:
        up = (true - delta) * math.exp(-epsilon)
        return max(0.0, up, 1 - delta - math.exp(epsilon) * (1 - true))

    return inverse


def gaussian_curve(separation: float) -> InverseCurve:
    """Inverse of the trade-off curve of two unit normals."""

    def inverse(true: float) -> float:
        if not 0 < true < 1:
            return true
        return math.erfc((separation - _UNIT.inv_cdf(true)) / math.sqrt(2)) / 2

    return inverse
