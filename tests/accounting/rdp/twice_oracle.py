"""Twice sampling as the paper prints it, in 40 digits."""

from typing import Any

import mpmath


def printed(order: int, blocks: Any, q1: float, q2: float) -> float:
    """Theorems 5.2, 5.4 and 5.6 as printed: `blocks` of (d0, largest shift over deviation)."""

    def mixed(a: int, rate: float, log_moment: Any) -> Any:
        terms = (
            mpmath.binomial(a, v)
            * (1 - mpmath.mpf(rate)) ** (a - v)
            * mpmath.mpf(rate) ** v
            * mpmath.exp(log_moment(v))
            for v in range(a + 1)
        )
        return mpmath.log(mpmath.fsum(terms))

    def coordinates(v: int) -> Any:
        if v < 2:
            return mpmath.mpf(0)
        return mpmath.fsum(
            d0 * mixed(v, q2, lambda k, shift=shift: k * (k - 1) * mpmath.mpf(shift) ** 2 / 2)
            for d0, shift in blocks
        )

    with mpmath.workdps(40):
        return float(mixed(order, q1, coordinates) / (order - 1))
