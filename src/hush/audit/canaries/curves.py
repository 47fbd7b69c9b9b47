"""Whether right guesses about many canaries refute a trade-off curve (f-DP).

After Mahloujifar, Melis and Chaudhuri 2024; proved in docs/guarantees/audit-canaries.md.
"""

import math
from collections.abc import Callable
from statistics import NormalDist

_UNIT = NormalDist()


def refutes_curve(
    right: int, made: int, canaries: int, level: float, inverse: Callable[[float], float]
) -> bool:
    """Whether so many right guesses have a chance of less than `level` under a curve.

    `inverse(y)` is the least false positive rate at which the curve allows true positives y. Suppose the
    chance of `right` or more is `level`. Going down from there, the curve tells how likely fewer right
    guesses must be at least; if all of them together need more than 1, it was not.
    """
    in_place = right * level / canaries
    missing = (made - right) * level / canaries
    for count in range(right - 1, -1, -1):
        # at least so many wrong guesses, weighed by their number, as the next right ones need
        needed = inverse(min(1.0, in_place))
        if needed > missing:
            in_place += count / (made - count) * (needed - missing)
            missing = needed
        if in_place + missing > made / canaries:
            return True
    return in_place + missing > made / canaries


def approximate(epsilon: float, delta: float) -> Callable[[float], float]:
    """The least false positive rate at which (epsilon, delta) allows so many true positives."""

    def inverse(true: float) -> float:
        up = (true - delta) * math.exp(-epsilon)
        return max(0.0, up, 1 - delta - math.exp(epsilon) * (1 - true))

    return inverse


def normal(separation: float) -> Callable[[float], float]:
    """The same for two unit normals so far apart."""

    def inverse(true: float) -> float:
        if not 0 < true < 1:
            return true
        return math.erfc((separation - _UNIT.inv_cdf(true)) / math.sqrt(2)) / 2

    return inverse
