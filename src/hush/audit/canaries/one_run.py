"""Many canaries, each in or out by a fair coin, and one run: what right guesses say of epsilon.

After Steinke, Nasr and Jagielski 2023, with a bound that is proved: docs/guarantees/audit-canaries.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from hush.accounting.pld import analytic_gaussian
from hush.audit.canaries.curves import approximate, normal, refutes_curve
from hush.audit.lower_bound import CONFIDENCE
from hush.core.errors import DataError, InvalidValue
from hush.core.guarantee import DELTA
from hush.core.ranges import check_count

# Finer than what chance leaves of any such bound.
_STEP = 0.01
_STRIDE = 50
_MOST = 30.0


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """So many guesses about canaries, the surest ones, and how many of them were right."""

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
    """Those that the epsilon was read off."""


def guessed(scores: npt.ArrayLike, included: npt.ArrayLike, made: int) -> Guesses:
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
    many = np.asarray(scores).size
    tried = [guessed(scores, included, max(1, round(share * many))) for share in shares]

    bounds = [_last(partial(_by_curve, found, level, delta)) for found in tried]
    separation = max(_last(partial(_by_normal, found, level)) for found in tried)
    return OneRun(
        epsilon=max(bounds),
        separation=separation,
        gaussian_epsilon=analytic_gaussian.epsilon(separation, delta).lower,
        guesses=tried[bounds.index(max(bounds))],
    )


def _by_curve(found: Guesses, level: float, delta: float, epsilon: float) -> bool:
    return refutes_curve(found.right, found.made, found.canaries, level, approximate(epsilon, delta))


def _by_normal(found: Guesses, level: float, separation: float) -> bool:
    return refutes_curve(found.right, found.made, found.canaries, level, normal(separation))


def _last(refutes: Callable[[float], bool]) -> float:
    """The last of a fixed grid of values that is refuted, 0 if none is.

    The grid is walked from below, in strides and then in steps, up to the first that is not refuted. A
    bound above the truth then means that the first stride or the first step above the truth was refuted,
    which holds there as well. Both rejections are of the form "at least so many right", so that one
    contains the other: no more than one chance of error, and no monotony of the test is needed.
    """
    last = 0
    for stride in (_STRIDE, 1):
        while last + stride <= _MOST / _STEP and refutes((last + stride) * _STEP):
            last += stride
    return last * _STEP
