"""Privacy loss distributions: epsilon and delta of composed steps, certified from both sides.

**Guarantee.** The true value lies between `lower` and `upper`, for add/remove-one-record
neighbours, whatever the width of the grid: docs/guarantees/poisson-gaussian.md and scalar-noise.md.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from hush.accounting.mechanism import SampledGaussian
from hush.accounting.pld import analytic_gaussian, coarse_bounds
from hush.accounting.pld.compose import Curve, compose
from hush.accounting.pld.lattice import Lattice, fitted, optimistic, pessimistic
from hush.accounting.pld.privacy_loss import Direction, Step, reach
from hush.accounting.pld.tilting import Cumulants, Window, window
from hush.core.guarantee import Bound

Counts = Mapping[Step, int]
AnyStep = TypeVar("AnyStep", bound=Step)

# The gap between upper and lower that the grid aims at. It has LONGEST points at most, and is
# refined up to MODERATE points where the aim was missed.
ACCURACY = 4e-4
MODERATE, LONGEST = 1 << 20, 1 << 21
# The share of delta that may be lost to losses beyond the grid.
BEYOND = 1e-7


def epsilon(counts: Mapping[AnyStep, int], delta: float) -> Bound:
    """Bounds on the epsilon at `delta` of running each step as often as `counts` says."""
    sampled, separation = _merged(counts)
    if not sampled:
        return analytic_gaussian.epsilon(separation, delta)
    pieces = _pieces(sampled, separation)
    if coarse_bounds.total_variation(pieces) <= delta:
        return Bound(lower=0.0, upper=0.0)
    noisier = _noisier(pieces)
    lower = upper = 0.0
    for direction in Direction:
        found = _epsilon(noisier, direction, delta, known=lower)
        lower, upper = max(lower, found[0]), max(upper, found[1])
    if noisier != pieces or upper > lower + 10 * ACCURACY * max(1.0, lower):
        rough = coarse_bounds.epsilon(pieces, delta)
        upper = max(lower, rough if noisier != pieces else min(upper, rough))
    return Bound(lower=lower, upper=upper)


def delta(counts: Mapping[AnyStep, int], epsilon: float) -> Bound:
    """Bounds on the delta at `epsilon` of running each step as often as `counts` says."""
    sampled, separation = _merged(counts)
    if not sampled:
        return analytic_gaussian.delta(separation, epsilon)
    pieces = _pieces(sampled, separation)
    noisier = _noisier(pieces)
    lower = upper = 0.0
    for direction in Direction:
        found = _delta(noisier, direction, epsilon)
        lower, upper = max(lower, found[0]), max(upper, found[1])
    if noisier != pieces:
        upper = (
            0.0 if all(coarse_bounds.max_loss(pieces, side) <= epsilon for side in Direction) else 1.0
        )
    upper = min(upper, coarse_bounds.total_variation(pieces), 1.0)
    return Bound(lower=min(lower, upper), upper=upper)


def exceeds(counts: Mapping[AnyStep, int], delta: float, epsilon: float) -> bool:
    """Whether the steps certainly are not (epsilon, delta)-private; if not, nothing is known.

    Needs no grid: one test, whether any step's privacy loss is large, tells the two laws apart.
    """
    sampled, separation = _merged(counts)
    noisier = _noisier(_pieces(sampled, separation))
    return bool(noisier) and coarse_bounds.least_delta(noisier, epsilon) > delta


def likely_exceeds(counts: Counts, epsilon: float) -> bool:
    """Whether nearly every outcome's privacy loss is above `epsilon`: an estimate, not a bound.

    For deciding what is worth working out; the mean loss is ten deviations above `epsilon`.
    """
    if not counts or math.isinf(epsilon):
        return False
    mean, deviation = Cumulants(_noisier(counts), Direction.REMOVE, BEYOND).scale(0.0)
    return mean - 10 * deviation > epsilon


def _merged(counts: Mapping[AnyStep, int]) -> tuple[dict[Step, int], float]:
    """The steps, but for all full-batch Gaussian ones as one separation of unit normals."""
    others: dict[Step, int] = {}
    full = []
    for step, count in counts.items():
        if isinstance(step, SampledGaussian) and step.rate == 1:
            full.append(math.sqrt(count) / step.multiplier)
        elif count:
            others[step] = count
    return others, math.hypot(*full)


def _pieces(others: dict[Step, int], separation: float) -> dict[Step, int]:
    """All steps; the full-batch Gaussian ones are one."""
    full: dict[Step, int] = {SampledGaussian(1.0, 1 / separation): 1} if separation > 0 else {}
    return {**others, **full}


def _noisier(pieces: Counts) -> dict[Step, int]:
    """The steps with the least noise that a grid can hold, or more: no less private."""
    raised: dict[Step, int] = {}
    for step, count in pieces.items():
        least = step.noisier()
        raised[least] = raised.get(least, 0) + count
    return raised


def _epsilon(pieces: Counts, direction: Direction, delta: float, known: float) -> tuple[float, float]:
    """Lower and upper bounds on epsilon in one direction; `known` is a lower bound already found.

    The lower bound is not worked out where it could not exceed the known one.
    """
    lowest, highest = 0.0, coarse_bounds.max_loss(pieces, direction)
    if highest <= known:
        return lowest, highest
    tail = _tail(pieces, math.log(delta))
    view = window(Cumulants(pieces, direction, tail), log_delta=math.log(delta), epsilon=0.0)
    for width in _widths(pieces, direction, view, tail, max(known, view.top)):
        upper = compose(_parts(pessimistic, pieces, direction, width, tail), view)
        highest = min(highest, max(0.0, _crossing(upper, upper.upper, delta) + upper.drift))
        del upper  # as long as the window, like the curve that follows
        if highest <= known:
            break
        parts = _parts(optimistic, pieces, direction, width, tail)
        if _any_mass(parts):
            lower = compose(parts, view)
            lowest = max(lowest, _crossing(lower, lower.lower, delta) - lower.drift)
        if highest - lowest <= 2 * _aim(max(known, highest)):
            break
    return min(lowest, highest), highest


def _delta(pieces: Counts, direction: Direction, epsilon: float) -> tuple[float, float]:
    """Lower and upper bounds on delta in one direction."""
    if coarse_bounds.max_loss(pieces, direction) <= epsilon:
        return 0.0, 0.0
    rough = window(Cumulants(pieces, direction, 1e-300), log_delta=None, epsilon=epsilon)
    tail = _tail(pieces, rough.log_delta)
    view = window(Cumulants(pieces, direction, tail), log_delta=None, epsilon=epsilon)
    lowest, highest = 0.0, 1.0
    for width in _widths(pieces, direction, view, tail, epsilon + view.spread):
        upper = compose(_parts(pessimistic, pieces, direction, width, tail), view)
        highest = min(highest, _height(upper, upper.upper, epsilon - upper.drift, outside=1.0))
        del upper
        parts = _parts(optimistic, pieces, direction, width, tail)
        if _any_mass(parts):
            lower = compose(parts, view)
            lowest = max(lowest, _height(lower, lower.lower, epsilon + lower.drift, outside=0.0))
        if highest <= 1.01 * lowest:
            break
    return min(lowest, highest), highest


def _tail(pieces: Counts, log_delta: float) -> float:
    """The mass of one step that may lie beyond the grid: a power of ten, so that it is reused."""
    log_tail = log_delta + math.log(BEYOND / sum(pieces.values()))
    return 10.0 ** max(math.floor(log_tail / math.log(10)), -300)


def _aim(scale: float) -> float:
    """The gap to aim at: relative to `scale` where that is below 1 (not far below), or far above."""
    return ACCURACY * max(1e-4, min(1.0, scale), scale / 40)


def _widths(
    pieces: Counts, direction: Direction, view: Window, tail: float, scale: float
) -> Iterator[float]:
    """Grid widths to try, the first one usually good enough: powers of 2^(1/4), to be reused.

    The gap is about (1 + tilt) * steps * width^2 / 8 (docs/guarantees/poisson-gaussian.md) if the
    grid resolves the loss of one step. With few steps it may not, and finer ones follow.
    """
    width = math.sqrt(8 * _aim(scale) / (1 + view.tilt) / sum(pieces.values()))
    width = min(width, 1 / view.tilt)
    longest = view.top - view.bottom
    for step in pieces:
        low, high = reach(step, direction, tail)
        longest = max(longest, high - low)
    least = longest / LONGEST
    width = max(width, 1.2 * least)
    width = 2.0 ** (math.floor(4 * math.log2(width)) / 4)
    bounded = [step for step in pieces if step.law.most < math.inf]
    commonest = max(bounded, key=pieces.__getitem__, default=None)
    while True:
        close = fitted(commonest, direction, width) if commonest else width
        yield close if close > least else width
        width /= 8
        if width <= longest / MODERATE:
            return


def _parts(
    lattice: Callable[[Step, Direction, float, float], Lattice],
    pieces: Counts,
    direction: Direction,
    width: float,
    tail: float,
) -> list[tuple[Lattice, int]]:
    return [(lattice(step, direction, width, tail), count) for step, count in pieces.items()]


def _any_mass(parts: list[tuple[Lattice, int]]) -> bool:
    """Whether each lattice has some mass left; one from below has none where all is lost in rounding."""
    return all(lattice.masses.any() for lattice, _ in parts)


def _crossing(curve: Curve, bound: Callable[[int], float], delta: float) -> float:
    """The last epsilon at which `bound` falls to `delta`; between grid points it is linear in exp.

    A lower bound is nothing far below the window's centre, so the search starts from many points.
    """
    last = len(curve.tilted) - 1
    first = min(max(0, math.floor(-curve.start / curve.width)), last)
    starts = sorted({first + (last - first) * part // 16 for part in range(17)})
    exceeding = [place for place, start in enumerate(starts) if bound(start) > delta]
    if not exceeding:
        # An upper bound is within delta from here on; a lower one that never exceeds it says nothing.
        return curve.epsilon(first) if bound == curve.upper else -math.inf
    if exceeding[-1] == len(starts) - 1:
        return math.inf if bound == curve.upper else curve.epsilon(last)
    low, high = starts[exceeding[-1]], starts[exceeding[-1] + 1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if bound(middle) > delta else (low, middle)
    share = (bound(low) - delta) / (bound(low) - bound(high))
    return curve.epsilon(low) + math.log1p(share * math.expm1(curve.width))


def _height(curve: Curve, bound: Callable[[int], float], epsilon: float, outside: float) -> float:
    """`bound` at `epsilon`; where the curve does not reach, what is true anyway."""
    k = math.floor((epsilon - curve.start) / curve.width)
    last = len(curve.tilted) - 1
    if k < 0:
        return max(outside, bound(0))
    if k >= last:
        return min(outside, bound(last))
    share = math.expm1(epsilon - curve.epsilon(k)) / math.expm1(curve.width)
    return (1 - share) * bound(k) + share * bound(k + 1)
