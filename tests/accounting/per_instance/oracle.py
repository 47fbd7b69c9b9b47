"""The four laws on a fixed support by numerical integration in many digits; shares no code with hush."""

import itertools
from collections.abc import Callable
from typing import Any

import mpmath

Outcomes = tuple[list[Callable[[Any], Any]], Callable[[Any, Any], Any] | None]


def outcomes(kind: str, bound: float, levels: int) -> Outcomes:
    """Probabilities of single outcomes and the density between -bound and bound, by location."""
    phi, cdf = mpmath.npdf, mpmath.ncdf

    def upper(x: Any) -> Any:
        return mpmath.erfc(x / mpmath.sqrt(2)) / 2

    def between(low: Any, high: Any) -> Callable[[Any], Any]:
        return lambda t: (
            upper(low - t) - upper(high - t) if low + high > 2 * t else cdf(high - t) - cdf(low - t)
        )

    b = mpmath.mpf(bound)
    if kind == "rectified":
        return [lambda t: cdf(-b - t), lambda t: upper(b - t)], lambda z, t: phi(z - t)
    if kind == "truncated":
        return [], lambda z, t: phi(z - t) / between(-b, b)(t)
    if kind == "sign":
        return [lambda t: cdf(-t), lambda t: upper(-t)], None
    spacing = 2 * b / (levels - 1)
    cuts = [-b + spacing * (k + mpmath.mpf(1) / 2) for k in range(levels - 1)]
    inner = [between(low, high) for low, high in itertools.pairwise(cuts)]
    return [lambda t: cdf(cuts[0] - t), *inner, lambda t: upper(cuts[-1] - t)], None


def total(
    kind: str, bound: float, levels: int, term: Callable[[Callable[[Any], Any]], Any], centres: list[Any]
) -> Any:
    """The sum and integral of `term` over all outcomes, each given as its likelihood by location."""
    atoms, density = outcomes(kind, bound, levels)
    summed = mpmath.fsum(term(atom) for atom in atoms)
    if density is not None:
        # cut where the integrand can be steep: around its centres, and at both ends
        b = mpmath.mpf(bound)
        marks = {-b, b}
        for centre in centres:
            marks |= {centre + k for k in (-9, -3, 0, 3, 9)}
        for end in (-b, b):
            steep = max(1, *(abs(end - centre) for centre in centres))
            marks |= {end + sign * k / steep for sign in (-1, 1) for k in (1, 3, 8, 20, 60)}
        points = sorted(x for x in marks if -b <= x <= b)
        summed += mpmath.quad(lambda z: term(lambda t: density(z, t)), points)
    return summed


def divergence(
    kind: str, bound: float, levels: int, location: float, shift: float, order: float, digits: int = 30
) -> Any:
    """D_a(law(location) || law(location + shift)), as the log of 1 and what is over."""
    with mpmath.workdps(digits):
        t, c, a = (mpmath.mpf(x) for x in (location, shift, order))

        def term(likelihood: Callable[[Any], Any]) -> Any:
            p, q = likelihood(t), likelihood(t + c)
            if q == 0:
                return mpmath.mpf(0)
            with mpmath.extradps(30):  # the three terms cancel
                return q * (mpmath.power(p / q, a) - 1 - a * (p / q - 1))

        excess = total(kind, bound, levels, term, [t, t + c, t - (a - 1) * c])
        return mpmath.log1p(excess) / (a - 1)


def information(kind: str, bound: float, levels: int, location: float, digits: int = 30) -> Any:
    """The mean of the squared score, by a difference quotient of high accuracy."""
    with mpmath.workdps(digits):
        t = mpmath.mpf(location)

        def term(likelihood: Callable[[Any], Any]) -> Any:
            with mpmath.extradps(40):
                step = mpmath.mpf(10) ** -18
                p = likelihood(t)
                if p == 0:
                    return mpmath.mpf(0)
                slope = (likelihood(t + step) - likelihood(t - step)) / (2 * step)
                return slope**2 / p

        return total(kind, bound, levels, term, [t])
