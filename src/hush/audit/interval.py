"""From counts of right and wrong guesses to a lower bound on epsilon."""

import math

import numpy as np
from scipy.special import betaincinv

from hush.core.errors import InvalidValue
from hush.core.guarantee import DELTA
from hush.core.number import Range, check_count

CONFIDENCE = Range(
    above=0,
    below=1,
    why="it is the chance that the interval holds, and no count of chance events makes one certain",
    example=0.95,
)
_WHY = "trials are counted one by one"
# betaincinv is right to about 1e-14; the ends are moved outwards by more.
_OUTWARD = 1e-12


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """The interval that holds the chance of a success, each end missed with (1 - confidence) / 2.

    **Guarantee.** Whatever the chance, both ends are right with probability `confidence` at least, if
    the trials are independent and `trials` was fixed before they were made: docs/guarantees/audit.md.

    >>> low, high = clopper_pearson(0, 100, 0.95)
    >>> low, round(high, 6)
    (0.0, 0.036217)
    """
    trials = check_count("trials", trials, _WHY, at_least=1)
    successes = check_count("successes", successes, _WHY)
    if successes > trials:
        raise InvalidValue(
            f"successes={successes} must be at most trials={trials}: each trial succeeds once or not.",
            key="successes",
        )
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
    """The epsilon, at `delta`, that such a test refutes everything below of.

    Of `positives` runs with the record `true_positives` were called so, and of `negatives` runs without
    it `false_positives`. With probability `confidence` no guarantee of a smaller epsilon holds.

    **Guarantee.** docs/guarantees/audit.md: both directions follow from the same two one-sided
    intervals, so `1 - confidence` is split in two and not in four. The test must have been chosen
    without these runs.

    >>> round(epsilon_lower(900, 1000, 100, 1000, 1e-5, 0.95), 3)
    1.99
    """
    delta = DELTA["range"].check("delta", delta)
    hit, _ = clopper_pearson(true_positives, positives, confidence)
    _, wrong = clopper_pearson(false_positives, negatives, confidence)
    return max(0.0, _log_ratio(hit - delta, wrong), _log_ratio(1 - wrong - delta, 1 - hit))


def _log_ratio(above: float, below: float) -> float:
    """The logarithm of the ratio, 0 where there is nothing above."""
    return math.log(above / below) if above > 0 else 0.0
