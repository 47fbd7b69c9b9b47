"""Accountant with privacy loss distributions: certified bounds on epsilon and delta of composed steps.

**Guarantee.** The true value is between `lower` and `upper`: docs/guarantees/poisson-gaussian.md and
scalar-noise.md.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from hush.accounting.numerics import OUTWARD, UNIT, probability_of_any
from hush.accounting.pld import analytic_gaussian
from hush.accounting.pld.compose import Cumulants, PrivacyCurve, Window, choose_window, compose
from hush.accounting.pld.lattice import aligned_width, optimistic, pessimistic
from hush.accounting.pld.laws import MAX_LOSS
from hush.accounting.pld.privacy_loss import Direction, Step
from hush.accounting.rdp import gaussian
from hush.accounting.steps import SampledGaussian
from hush.core.guarantee import Bound

Counts = Mapping[Step, int]
AnyStep = TypeVar("AnyStep", bound=Step)

# Target gap between the bounds, and numbers of grid points that limit the refinement.
ACCURACY = 4e-4
MAX_REFINED_POINTS, MAX_POINTS = 1 << 20, 1 << 21
# Fraction of delta for losses outside the grid.
TRUNCATED_SHARE = 1e-7
# Number of epsilons of a privacy profile that share a curve.
_SHARING = 32


def epsilon(counts: Mapping[AnyStep, int], delta: float) -> Bound:
    """Bounds on epsilon at `delta`; `counts` is the number of executions of each step."""
    steps, noisier, mu = _prepared(counts)
    if mu is not None:
        return analytic_gaussian.epsilon(mu, delta)
    if coarse_total_variation(steps) <= delta:
        return Bound(lower=0.0, upper=0.0)
    lower = upper = 0.0
    for direction in Direction:
        one_sided = _epsilon(noisier, direction, delta, at_least=lower)
        lower, upper = max(lower, one_sided[0]), max(upper, one_sided[1])
    if noisier != steps or upper > lower + 10 * ACCURACY * max(1.0, lower):
        coarse = coarse_epsilon_upper(steps, delta)
        upper = max(lower, coarse if noisier != steps else min(upper, coarse))
    return Bound(lower=lower, upper=upper)


def delta(counts: Mapping[AnyStep, int], epsilon: float) -> Bound:
    """Bounds on delta at `epsilon`; `counts` is the number of executions of each step."""
    return profile(counts, [epsilon])[0]


def profile(counts: Mapping[AnyStep, int], epsilons: Sequence[float]) -> list[Bound]:
    """Bounds on delta at increasing `epsilons` (privacy profile)."""
    steps, noisier, mu = _prepared(counts)
    if mu is not None:
        return [analytic_gaussian.delta(mu, epsilon) for epsilon in epsilons]
    lowers, uppers = [0.0] * len(epsilons), [0.0] * len(epsilons)
    for direction in Direction:
        decisive = [max(lower, upper / 1000) for lower, upper in zip(lowers, uppers, strict=True)]
        bounds = _one_sided_profile(noisier, direction, epsilons, decisive)
        for k, (lower, upper) in enumerate(bounds):
            lowers[k], uppers[k] = max(lowers[k], lower), max(uppers[k], upper)
    if noisier != steps:
        largest = max(max_composed_loss(steps, direction) for direction in Direction)
        uppers = [0.0 if largest <= epsilon else 1.0 for epsilon in epsilons]
    variation = coarse_total_variation(steps)
    uppers = [min(upper, variation, 1.0) for upper in uppers]
    return [Bound(lower=min(ends), upper=ends[1]) for ends in zip(lowers, uppers, strict=True)]


def profile_upper(counts: Mapping[AnyStep, int], epsilons: Sequence[float]) -> list[float]:
    """Upper bounds of `profile` at many increasing `epsilons`.

    The bounds are slightly larger than those of `profile`, because several epsilons share a curve.
    """
    steps, noisier, mu = _prepared(counts)
    if mu is not None or noisier != steps:
        return [delta(counts, epsilon).upper for epsilon in epsilons]
    variation = coarse_total_variation(steps)
    highest = [0.0] * len(epsilons)
    for direction in Direction:
        for start in range(0, len(epsilons), _SHARING):
            shared = epsilons[start : start + _SHARING]
            for place, upper in enumerate(_deltas_upper(steps, direction, shared), start):
                highest[place] = max(highest[place], min(upper, variation))
    return highest


def exceeds(counts: Mapping[AnyStep, int], delta: float, epsilon: float) -> bool:
    """Whether the composition certainly violates (epsilon, delta). This test needs no grid."""
    noisier = _prepared(counts)[1]
    return bool(noisier) and coarse_delta_lower(noisier, epsilon) > delta


def _prepared(
    counts: Mapping[AnyStep, int],
) -> tuple[dict[Step, int], dict[Step, int], float | None]:
    """Prepare steps for composition.

    Returns:
        The steps, with all full-batch Gaussian steps merged; the same steps with noise added if their
        losses are too large for a grid, which is valid for lower bounds; and the mu of Gaussian DP, or
        None if there are steps other than full-batch Gaussian.
    """
    merged: Counter[Step] = Counter()
    raised: Counter[Step] = Counter()
    mus = []
    for step, count in counts.items():
        if isinstance(step, SampledGaussian) and step.rate == 1:
            mus.append(math.sqrt(count) / step.multiplier)
        elif count:
            merged[step] = count
    mu, only_full_batch = math.hypot(*mus), not merged
    if mu > 0:
        merged[SampledGaussian(1.0, 1 / mu)] = 1
    for exact, count in merged.items():
        raised[exact.with_representable_loss()] += count
    return merged, raised, mu if only_full_batch else None


def _epsilon(steps: Counts, direction: Direction, delta: float, at_least: float) -> tuple[float, float]:
    """Lower and upper bounds on epsilon in one direction.

    The lower bound is not computed if it cannot exceed `at_least`, the bound in the other direction.
    """
    lowest, highest = 0.0, max_composed_loss(steps, direction)
    if highest <= at_least:
        return lowest, highest
    tail = _step_tail(steps, math.log(delta))
    window = choose_window(Cumulants(steps, direction, tail), log_delta=math.log(delta), epsilon=0.0)
    for width in _grid_widths(steps, direction, window, tail, max(at_least, window.high)):
        if curve := _curve(steps, direction, width, tail, window, upper=True):
            highest = min(highest, max(0.0, curve.epsilon_at(delta, upper=True)))
        curve = None  # free its memory before the next curve
        if highest <= at_least:
            break
        if curve := _curve(steps, direction, width, tail, window, upper=False):
            lowest = max(lowest, curve.epsilon_at(delta, upper=False))
        if highest - lowest <= 2 * _target_gap(max(at_least, highest)):
            break
    return min(lowest, highest), highest


def _one_sided_profile(
    steps: Counts, direction: Direction, epsilons: Sequence[float], decisive: Sequence[float]
) -> list[tuple[float, float]]:
    """Lower and upper bounds on delta in one direction, at each of the increasing `epsilons`.

    Each curve is tilted for one epsilon, and also used for larger epsilons within a standard deviation
    of the tilted loss. If delta is below `decisive`, the other direction is larger, so the delta of a
    smaller epsilon is accurate enough.
    """
    bounds: list[tuple[float, float]] = []
    max_loss = max_composed_loss(steps, direction)
    while (done := len(bounds)) < len(epsilons):
        epsilon = epsilons[done]
        if max_loss <= epsilon:
            bounds.append((0.0, 0.0))
        elif bounds and bounds[-1][1] <= decisive[done]:
            bounds.append((0.0, bounds[-1][1]))
        else:
            window, tail = _window_at(steps, direction, epsilon)
            near = [other for other in epsilons[done:] if other <= epsilon + window.deviation]
            bounds += _deltas(steps, direction, near, window, tail)
    return bounds


def _window_at(steps: Counts, direction: Direction, epsilon: float) -> tuple[Window, float]:
    """Window for an epsilon, and maximum probability mass of one step outside the grid."""
    rough = choose_window(Cumulants(steps, direction, 1e-300), log_delta=None, epsilon=epsilon)
    if rough.low > epsilon:
        # ignore losses with negligible probability, because they are too large for the tilt
        rough = choose_window(Cumulants(steps, direction, 1e-30), log_delta=None, epsilon=epsilon)
    tail = _step_tail(steps, rough.log_delta)
    return choose_window(Cumulants(steps, direction, tail), log_delta=None, epsilon=epsilon), tail


def _deltas(
    steps: Counts, direction: Direction, epsilons: Sequence[float], window: Window, tail: float
) -> list[tuple[float, float]]:
    """Lower and upper bounds on delta at each epsilon, in the window of the first epsilon."""
    lowest, highest = [0.0] * len(epsilons), [1.0] * len(epsilons)
    for width in _grid_widths(steps, direction, window, tail, epsilons[0] + window.deviation):
        for upper, bounds, tighter in ((True, highest, min), (False, lowest, max)):
            if curve := _curve(steps, direction, width, tail, window, upper=upper):
                for k, epsilon in enumerate(epsilons):
                    bounds[k] = tighter(bounds[k], curve.delta_at(epsilon, upper=upper))
            curve = None  # free its memory before the next curve
        if highest[0] <= 1.01 * lowest[0]:
            break
    return [(min(ends), ends[1]) for ends in zip(lowest, highest, strict=True)]


def _deltas_upper(steps: Counts, direction: Direction, epsilons: Sequence[float]) -> list[float]:
    """Upper bounds on delta in one direction, from one curve in the window of the middle epsilon."""
    largest = max_composed_loss(steps, direction)
    middle = epsilons[len(epsilons) // 2]
    if largest <= epsilons[0]:
        return [0.0] * len(epsilons)
    if largest <= middle:
        middle = epsilons[0]
    window, tail = _window_at(steps, direction, middle)
    width = next(_grid_widths(steps, direction, window, tail, middle + window.deviation))
    curve = _curve(steps, direction, width, tail, window, upper=True)
    assert curve is not None
    return [
        0.0 if largest <= epsilon else min(1.0, curve.delta_at(epsilon, upper=True))
        for epsilon in epsilons
    ]


def _step_tail(steps: Counts, log_delta: float) -> float:
    """Maximum probability mass of one step outside the grid.

    It is rounded down to a power of ten, so lattices can be cached.
    """
    log_tail = log_delta + math.log(TRUNCATED_SHARE / sum(steps.values()))
    return 10.0 ** max(math.floor(log_tail / math.log(10)), -300)


def _target_gap(scale: float) -> float:
    """Target gap between the bounds: relative to `scale` between 1e-4 and 1, and above 40."""
    return ACCURACY * max(1e-4, min(1.0, scale), scale / 40)


def _grid_widths(
    steps: Counts, direction: Direction, window: Window, tail: float, scale: float
) -> Iterator[float]:
    """Decreasing grid widths to try; usually only the first one is used.

    The gap between the bounds is about (1 + tilt) * steps * width^2 / 8 if the grid resolves the loss of
    one step (docs/guarantees/poisson-gaussian.md). Otherwise finer grids are needed. Widths are powers
    of 2^(1/4), so lattices can be cached.
    """
    width = math.sqrt(8 * _target_gap(scale) / (1 + window.tilt) / sum(steps.values()))
    width = min(width, 1 / window.tilt)
    length = window.high - window.low
    for step in steps:
        low, high = step.loss_quantiles(direction, tail)
        length = max(length, high - low)
    min_width = length / MAX_POINTS
    width = max(width, 1.2 * min_width)
    width = 2.0 ** (math.floor(4 * math.log2(width)) / 4)
    bounded = [step for step in steps if step.ratio_range[1] < math.inf]
    commonest = max(bounded, key=steps.__getitem__, default=None)
    while True:
        aligned = aligned_width(commonest, direction, width) if commonest else width
        yield aligned if aligned > min_width else width
        width /= 8
        if width <= length / MAX_REFINED_POINTS:
            return


def _curve(
    steps: Counts, direction: Direction, width: float, tail: float, window: Window, *, upper: bool
) -> PrivacyCurve | None:
    """Privacy curve on a grid; None for a lower bound if rounding errors exceed the mass of a step."""
    lattice = pessimistic if upper else optimistic
    parts = [(lattice(step, direction, width, tail), count) for step, count in steps.items()]
    return compose(parts, window) if all(part.masses.any() for part, _ in parts) else None


# Candidate offsets of a cut from epsilon + log(number of steps).
_MARGINS = np.array([0.5, 2.0, 8.0, 32.0])


def coarse_total_variation(counts: Counts) -> float:
    """Upper bound on the total variation distance, which is delta at epsilon 0.

    If each step is coupled optimally, all steps agree with at least the product of the probabilities.
    """
    return probability_of_any((step.total_variation, count) for step, count in counts.items())


def max_composed_loss(counts: Counts, direction: Direction) -> float:
    """Upper bound on the composed privacy loss (pure epsilon); may be infinite."""
    return OUTWARD * sum(
        count * step.loss_range(direction)[1] for step, count in counts.items() if count
    )


def coarse_delta_lower(counts: Counts, epsilon: float) -> float:
    """Lower bound on delta at `epsilon`: P(event) - exp(epsilon) Q(event).

    The event is that the privacy loss of any step exceeds a cut. Q(event) is bounded by a union bound.
    """
    if not epsilon < MAX_LOSS:
        return 0.0
    cuts = epsilon + math.log(sum(counts.values())) + _MARGINS
    log_none, second = np.zeros(len(cuts)), np.zeros(len(cuts))
    for step, count in counts.items():
        cut = step.cell_masses(Direction.REMOVE, cuts)
        # survival functions at the cuts are sums of positive terms with bounded rounding errors
        first = np.cumsum(cut.first[::-1])[::-1][1:] * (1 - 2 * cut.error.max())
        log_none += count * np.log1p(-np.clip(first, 0.0, 1 - 2.0**-53))
        second += count * np.cumsum(cut.second[::-1])[::-1][1:] * (1 + 2 * cut.error.max())
    with np.errstate(divide="ignore", over="ignore"):
        gap = -np.expm1(log_none) / OUTWARD - np.exp(epsilon + np.log(second)) * OUTWARD
    return max(0.0, float(gap.max()))


def coarse_epsilon_upper(counts: Counts, delta: float) -> float:
    """Upper bound on epsilon at `delta`, from Rényi divergences and quantiles of losses."""
    gaussian_steps = {step: count for step, count in counts.items() if isinstance(step, SampledGaussian)}
    non_gaussian = {step: count for step, count in counts.items() if step not in gaussian_steps}
    if not non_gaussian:
        return gaussian.epsilon(gaussian_steps, delta)
    share = delta / 2 if gaussian_steps else delta
    total = max(_loss_quantile(non_gaussian, direction, share) for direction in Direction)
    if gaussian_steps:
        total += gaussian.epsilon(gaussian_steps, share)
    return min(OUTWARD * total, max(max_composed_loss(counts, direction) for direction in Direction))


def _loss_quantile(counts: Counts, direction: Direction, delta: float) -> float:
    """Upper bound on the 1 - `delta` quantile of the composed loss."""
    tail = delta / sum(counts.values())
    total = 0.0
    for step, count in counts.items():
        ceiling = step.loss_quantiles(direction, tail)[1]
        if math.isinf(ceiling):
            return math.inf
        ceiling += 1e-12 * (1 + abs(ceiling))
        beyond = step.cell_masses(direction, np.array([ceiling]))
        if not beyond.first[-1] * (1 + beyond.error[-1]) <= tail:
            return math.inf
        # mixtures have larger rounding errors of losses
        total += count * (ceiling + (step.loss_rounding - 32 * UNIT) * (1 + abs(ceiling)))
    return max(0.0, total)
