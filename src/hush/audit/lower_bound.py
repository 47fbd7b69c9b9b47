"""Lower bounds on epsilon from the errors of a membership test, or from canaries in one or many runs.

References: Nasr et al. 2023; Steinke, Nasr and Jagielski 2023; Mahloujifar, Melis and Chaudhuri 2024.
Proofs: docs/guarantees/audit.md and docs/guarantees/audit-canaries.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
from scipy.special import betaincinv, ndtri

from hush.accounting.pld import analytic_gaussian
from hush.core.errors import DataError
from hush.core.guarantee import DELTA
from hush.core.value import Range

Array = npt.NDArray[np.float64]
CONFIDENCE = Range(above=0, below=1, why="it is the coverage probability of the interval", example=0.95)
_OUTWARD = 1e-12  # outward shift, larger than the error of betaincinv (about 1e-14)
_FEWEST_RUNS = 8
_STEP, _STRIDE, _LARGEST = 0.01, 50, 30.0
"""Grid of epsilons and separations. Its spacing is finer than the statistical error."""
_SHARES = (0.125, 0.25, 0.5, 1.0)
"""Fractions of the canaries to guess. The significance level 1 - confidence is split equally."""
_UNIT = NormalDist()

InverseCurve = Callable[[float], float]
"""Inverse trade-off curve: smallest false positive rate at a given true positive rate."""


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """Clopper-Pearson confidence interval for a success probability.

    **Guarantee.** The coverage is at least `confidence` if the trials are independent and their number
    is fixed in advance.

    >>> low, high = clopper_pearson(0, 100, 0.95)
    >>> low, round(high, 6)
    (0.0, 0.036217)
    """
    beyond = (1 - CONFIDENCE.check("confidence", confidence)) / 2
    failures = trials - successes
    low = 0.0 if successes == 0 else float(betaincinv(successes, failures + 1, beyond))
    high = 1.0 if failures == 0 else 1 - float(betaincinv(failures, successes + 1, beyond))
    return max(0.0, low * (1 - _OUTWARD)), min(1.0, high * (1 + _OUTWARD) + float(np.finfo(float).eps))


def epsilon_lower(
    true_positives: int,
    positives: int,
    false_positives: int,
    negatives: int,
    delta: float,
    confidence: float,
) -> float:
    """Lower bound on epsilon at `delta` from the errors of a membership test.

    The test accepted `true_positives` of `positives` runs with the record, and `false_positives` of
    `negatives` runs without it.

    **Guarantee.** The true epsilon is at least the result with probability `confidence`, if the test was
    chosen independently of these runs.

    >>> round(epsilon_lower(900, 1000, 100, 1000, 1e-5, 0.95), 3)
    1.99
    """
    delta = DELTA["range"].check("delta", delta)
    hit, _ = clopper_pearson(true_positives, positives, confidence)
    _, wrong = clopper_pearson(false_positives, negatives, confidence)
    ratios = (hit - delta, wrong), (1 - wrong - delta, 1 - hit)
    return max(0.0, *(math.log(above / below) for above, below in ratios if above > 0))


@dataclass(frozen=True, kw_only=True)
class Guesses:
    """Membership guesses for the canaries with the most extreme scores."""

    canaries: int
    made: int
    right: int


@dataclass(frozen=True, kw_only=True)
class CanaryBound:
    """Lower bounds from canaries; the confidence of the audit applies to each bound separately."""

    epsilon: float
    """Lower bound on epsilon at delta, for any mechanism."""
    separation: float
    """Lower bound on mu, if the trade-off curve is Gaussian."""
    gaussian_epsilon: float
    """Epsilon of this curve at delta. An estimate, except for Gaussian noise with full batches."""
    guesses: Guesses | None = None
    """Guesses that determine epsilon; None for many runs with one canary."""


def many_runs(
    inside: npt.ArrayLike, outside: npt.ArrayLike, *, delta: float, confidence: float = 0.95
) -> CanaryBound:
    """Lower bounds from the scores of one canary, in runs with it and in runs without it.

    The threshold is chosen on the first half of the runs, and the bounds use the second half.

    Args:
        inside: Scores in the runs with the canary.
        outside: Scores in the runs without the canary.
        delta: Delta of the bound.
        confidence: Confidence level of each bound.
    """
    DELTA["range"].check("delta", delta)
    scores = [np.asarray(values, dtype=np.float64) for values in (inside, outside)]
    if min(map(len, scores)) < _FEWEST_RUNS:
        raise DataError(
            f"{len(scores[0])} runs with the canary and {len(scores[1])} without it are too few: half "
            f"of them only determine the threshold. Pass at least {_FEWEST_RUNS} of each."
        )
    (first, present), (first_outside, absent) = (np.split(x, [len(x) // 2]) for x in scores)
    threshold = best_threshold(first, first_outside)
    hits, wrong = int((present > threshold).sum()), int((absent > threshold).sum())
    counts = hits, len(present), wrong, len(absent)
    separation = separation_lower(*counts, confidence)
    return CanaryBound(
        epsilon=epsilon_lower(*counts, delta, confidence),
        separation=separation,
        gaussian_epsilon=analytic_gaussian.epsilon(separation, delta).lower,
    )


def separation_lower(
    true_positives: int, positives: int, false_positives: int, negatives: int, confidence: float
) -> float:
    """Lower bound on the distance of two unit normal distributions, from the errors of a test."""
    true_rate, _ = clopper_pearson(true_positives, positives, confidence)
    _, false_rate = clopper_pearson(false_positives, negatives, confidence)
    if true_rate == 0 or false_rate == 1:
        return 0.0
    return max(0.0, float(ndtri(true_rate) - ndtri(false_rate)))


def roc_curve(members: Array, others: Array) -> tuple[Array, Array]:
    """ROC curve: false and true positive rates from (0, 0) to (1, 1), one point per distinct score."""
    for scores in (members, others):
        if scores.ndim != 1 or not len(scores) or np.isnan(scores).any():
            raise DataError("Scores must be a non-empty list of numbers, one for each record.")
    scores = np.concatenate([members, others])
    order = np.argsort(-scores, kind="stable")
    ordered = scores[order]
    last = np.append(np.flatnonzero(ordered[1:] != ordered[:-1]), len(scores) - 1)
    hits = np.cumsum(order < len(members))[last]
    accused = last + 1 - hits
    return np.append(0.0, accused / len(others)), np.append(0.0, hits / len(members))


def best_threshold(members: Array, others: Array) -> float:
    """Threshold that maximises the true positive rate minus the false positive rate."""
    false, true = roc_curve(members, others)
    place = int(np.argmax(true - false))
    scores = -np.unique(-np.concatenate([members, others]))
    below = scores[place] if place < len(scores) else scores[-1] - 1.0
    above = scores[place - 1] if place else scores[0] + 1.0
    return float((above + below) / 2)


def surest_guesses(scores: npt.ArrayLike, included: npt.ArrayLike, made: int) -> Guesses:
    """Guess "in" for the highest scores and "out" for the lowest scores.

    `made` is the number of guesses, which must be fixed in advance.
    """
    values, truth = np.asarray(scores, dtype=np.float64), np.asarray(included, dtype=bool)
    if values.ndim != 1 or values.shape != truth.shape or not len(values):
        raise DataError(
            f"Scores of shape {values.shape} and coins of shape {truth.shape} do not match. Pass one "
            "score and one coin per canary."
        )
    if np.isnan(values).any():
        raise DataError("The score of a canary is NaN, so its membership cannot be guessed.")
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
) -> CanaryBound:
    """Lower bounds from the scores of the canaries of one run.

    **Guarantee.** Suppose that the coins are fair and independent, and that the inputs of the scores
    satisfy (epsilon, delta)-DP for adding or removing one canary. Then the result exceeds this epsilon
    with probability at most 1 - confidence.

    Args:
        scores: Score of each canary. A larger score suggests inclusion.
        included: Whether each canary was included, by a fair coin flip.
        delta: Delta of the bound.
        confidence: Confidence level of each bound.
    """
    DELTA["range"].check("delta", delta)
    level = (1 - CONFIDENCE.check("confidence", confidence)) / len(_SHARES)
    canaries = np.asarray(scores).size
    guesses = [surest_guesses(scores, included, max(1, round(share * canaries))) for share in _SHARES]
    curve = partial(approximate_dp_curve, delta=delta)
    bounds = [_largest_refuted(some, level, curve) for some in guesses]
    separation = max(_largest_refuted(some, level, gaussian_curve) for some in guesses)
    return CanaryBound(
        epsilon=max(bounds),
        separation=separation,
        gaussian_epsilon=analytic_gaussian.epsilon(separation, delta).lower,
        guesses=guesses[bounds.index(max(bounds))],
    )


def _largest_refuted(guesses: Guesses, level: float, curve: Callable[[float], InverseCurve]) -> float:
    """Largest rejected value on a fixed grid of epsilons or separations, or 0.

    The search increases the value, in strides and then in single steps, until it is not rejected. No
    correction for multiple tests is needed, because the events "at least k correct guesses" are nested.
    """
    last, most = 0, _LARGEST / _STEP
    for stride in (_STRIDE, 1):
        while (at := last + stride) <= most and refutes_curve(guesses, level, curve(at * _STEP)):
            last = at
    return last * _STEP


def refutes_curve(guesses: Guesses, level: float, inverse: InverseCurve) -> bool:
    """Whether this number of correct guesses has probability below `level` under a trade-off curve.

    Suppose that `right` or more correct guesses have probability `level`. Then the curve implies lower
    bounds on the probabilities of fewer correct guesses. If all these probabilities sum to more than 1,
    the curve is rejected.
    """
    made, canaries = guesses.made, guesses.canaries
    hits = guesses.right * level / canaries
    misses = (made - guesses.right) * level / canaries
    for count in range(guesses.right - 1, -1, -1):
        # lower bound on the weighted number of wrong guesses, given the correct ones
        needed = inverse(min(1.0, hits))
        if needed > misses:
            hits += count / (made - count) * (needed - misses)
            misses = needed
        if hits + misses > made / canaries:
            return True
    return hits + misses > made / canaries


def approximate_dp_curve(epsilon: float, delta: float) -> InverseCurve:
    """Inverse trade-off curve of (epsilon, delta)-DP."""
    more, less = math.exp(epsilon), math.exp(-epsilon)
    return lambda true: max(0.0, (true - delta) * less, 1 - delta - more * (1 - true))


def gaussian_curve(separation: float) -> InverseCurve:
    """Inverse trade-off curve of two unit normal distributions."""

    def inverse(true: float) -> float:
        if not 0 < true < 1:
            return true
        return math.erfc((separation - _UNIT.inv_cdf(true)) / math.sqrt(2)) / 2

    return inverse
