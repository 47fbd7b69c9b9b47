"""What plans cost: Rényi divergence of one step, epsilon of many."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from hush.accounting.mechanism import (
    BOUNDED,
    Block,
    CoordinateWise,
    Entrywise,
    SampledGaussian,
    SampledNoise,
    Simple,
    mechanism,
)
from hush.accounting.pld import accountant
from hush.accounting.pld.privacy_loss import Array, Step
from hush.accounting.rdp.coordinatewise import WHOLE_ORDERS, coordinate_wise
from hush.accounting.rdp.gaussian import ORDERS, divergence, rdp_to_delta, rdp_to_epsilon
from hush.accounting.rdp.profile import CoordinateRDP, NoiseDensity
from hush.accounting.selective import bounds
from hush.accounting.selective.trial import TrainAndTest, Trial
from hush.clipping import L2, Entries, Lp
from hush.core.errors import InvalidValue
from hush.core.guarantee import DELTA, Arithmetic, Bound, Guarantee
from hush.core.plan import Plan
from hush.core.ranges import Range, as_floats, check_count, check_kind
from hush.core.release import Selective
from hush.core.sensitivity import SensitivitySet

_MOST_ORDERS = 10_000
_ORDER = Range(
    above=1,
    at_most=1e6,
    why="Rényi divergence bounds the privacy loss only above order 1, and beyond these orders it adds "
    "nothing",
    example=8.0,
)
_EPSILON = Range(at_least=0, why="a privacy loss below zero is none", example=1.0)
Dimension = int | Mapping[Plan, int] | None
"""The number of parameters: of all models, or of those trained by some of the plans, or not known."""

# High orders take long: a few more are worked out at a time, as long as higher ones could be better.
_COARSE = 6
_LAST = 4
_STAGES = (8, 14, 20, 26, *range(31, len(WHOLE_ORDERS), 3), len(WHOLE_ORDERS))
# Trials are charged at any order above 1; the low ones decide where epsilon is large.
_TRIAL_ORDERS: Array = np.append([1.1, 1.2, 1.35, 1.5, 1.75], WHOLE_ORDERS)

# Losses beyond this are taken as infinite: their squares would be no numbers.
_BEYOND = 1e100

_WHY_WHOLE = "each step is charged whole, so it is run whole or not at all"


def rdp(plan: Plan, orders: npt.ArrayLike, dimension: int | None = None) -> Array:
    """The Rényi divergence of one step of `plan` at each of the `orders`.

    **Guarantee.** Never below the larger of the two directions of adding and removing one record:
    docs/guarantees/poisson-gaussian.md, coordinate-wise.md and selective.md. `dimension`, the number of
    parameters, may lower the charge of noise other than Gaussian, and is needed where p = beta > 2.

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.FullBatch(),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=2.0),
    ... )
    >>> [round(float(value), 6) for value in hush.rdp(plan, orders=[2, 8])]
    [0.25, 1.0]
    """
    check_kind("plan", plan, Plan)
    return _total(_merged({plan: 1}, dimension), checked_orders(orders))[0]


def checked_orders(orders: npt.ArrayLike) -> Array:
    """The orders as an array, or an error that says which ones there are."""
    wanted = as_floats(orders)
    if wanted.ndim != 1 or not 0 < len(wanted) <= _MOST_ORDERS:
        raise InvalidValue(
            f"orders={orders!r} must be a list of 1 to {_MOST_ORDERS} numbers: each gives a bound of "
            "its own. Pass e.g. orders=[2, 4, 8]."
        )
    for order in wanted:
        _ORDER.check("orders", float(order))
    return wanted


def epsilon(
    plan: Plan,
    steps: int,
    delta: float,
    dimension: int | None = None,
    mode: Literal["proved", "published"] = "proved",
) -> Guarantee:
    """What `steps` steps of `plan` guarantee at `delta`.

    **Guarantee.** The true epsilon lies in the `Bound`: docs/guarantees/poisson-gaussian.md and
    coordinate-wise.md. `dimension` as in `rdp`. In the mode "published" there is none: it is what a
    plan's paper says of it, to be shown beside the proved number (see `hush claims`). For generalized
    Gaussian noise that is the cost in one dimension whatever the dimension (Appendix B.2).

    >>> import hush
    >>> plan = hush.Plan(
    ...     sampling=hush.Poisson(rate=0.01),
    ...     clipping=hush.L2(norm=1.0),
    ...     noise=hush.Gaussian(multiplier=1.0),
    ... )
    >>> print(hush.epsilon(plan, steps=10_000, delta=1e-5).epsilon)
    <= 6.1879 (and >= 6.1876)
    """
    check_kind("plan", plan, Plan)
    counts = {plan: check_count("steps", steps, _WHY_WHOLE)}
    if isinstance(mode, str) and mode == "published":
        return _published(plan, counts[plan], delta, dimension)
    if not isinstance(mode, str) or mode != "proved":
        raise InvalidValue(
            f'mode={mode!r} must be "proved" or "published": a guarantee says which it is.', key="mode"
        )
    return compose(counts, delta, dimension)


def _published(plan: Plan, steps: int, delta: float, dimension: int | None) -> Guarantee:
    """What its paper says of a plan, where that differs from what is proved."""
    if isinstance(plan.release, Selective):
        printed = replace(plan.release, accounting="published")
        return compose({replace(plan, release=printed): steps}, delta, dimension)
    if isinstance(plan.clipping, L2 | Lp | Entries):
        return replace(compose({plan: steps}, delta, dimension=1), basis="published")
    raise InvalidValue(
        f'mode="published" says nothing of {type(plan.clipping).__name__}: it is for generalized '
        "Gaussian noise and for Selective, whose papers charge something else than is proved. Leave "
        "mode out.",
        key="mode",
    )


def compose(counts: Mapping[Plan, int], delta: float, dimension: Dimension = None) -> Guarantee:
    """What running each plan as often as `counts` says guarantees at `delta`, all together."""
    delta = DELTA["range"].check("delta", delta)
    steps = _merged(counts, dimension)
    exact = all(plan.noise.exact for plan, count in counts.items() if count)
    arithmetic: Arithmetic = "proved" if exact else "assumed"
    if _drawn(steps) <= delta:
        return Guarantee(epsilon=Bound(lower=0.0, upper=0.0), delta=delta, arithmetic=arithmetic)
    bound = accountant.epsilon(_one_hot(steps), delta)
    if _by_renyi(steps):
        bound = _agreed(bound.lower, _upper(steps, delta))
    return Guarantee(
        epsilon=_attained(counts, bound), delta=delta, basis=_basis(steps), arithmetic=arithmetic
    )


def upper_epsilon(
    counts: Mapping[Plan, int],
    delta: float,
    dimension: Dimension = None,
    *,
    ceiling: float = math.inf,
) -> float:
    """The upper end of `spent`'s epsilon: all that a search needs, and often much cheaper.

    Args:
        counts: how often each plan is run.
        delta: the delta of the guarantee.
        dimension: the number of parameters, where the charge depends on it.
        ceiling: an epsilon beyond which the value does not matter.

    Returns:
        The upper bound; or infinity, if the true epsilon is certainly beyond `ceiling`.
    """
    delta = DELTA["range"].check("delta", delta)
    steps = _merged(counts, dimension)
    if _drawn(steps) <= delta:
        return 0.0
    shown = _one_hot(steps)
    if accountant.exceeds(shown, delta, ceiling):
        return math.inf
    if _by_renyi(steps):
        return _upper(steps, delta, ceiling)
    return accountant.epsilon(shown, delta).upper


def _by_renyi(steps: Mapping[Simple, int]) -> bool:
    """Whether a step's upper bound comes from Rényi divergences, for want of a dominating pair."""
    return any(isinstance(step, CoordinateWise | Trial) for step in steps)


def _upper(steps: Mapping[Simple, int], delta: float, ceiling: float = math.inf) -> float:
    """The upper bound on epsilon at `delta` of steps of which some are charged by Rényi divergences.

    Infinite if epsilon is certainly beyond `ceiling`.
    """
    missed = _given_up(steps)
    upper = math.inf
    if missed < delta:
        upper = 2 * missed + _renyi(
            steps,
            lambda total, orders: rdp_to_epsilon(total, orders, delta - missed),
            lambda one_hot: accountant.epsilon(one_hot, delta).lower,
            ceiling,
        )
    whole = _unthinned(steps)
    return upper if whole is None else min(upper, accountant.epsilon(whole, delta).upper)


def delta(counts: Mapping[Plan, int], epsilon: float, dimension: Dimension = None) -> Bound:
    """Bounds on the delta at `epsilon` of running each plan as often as `counts` says."""
    epsilon = _EPSILON.check("epsilon", epsilon)
    steps = _merged(counts, dimension)
    bound = accountant.delta(_one_hot(steps), epsilon)
    if _by_renyi(steps):
        missed = _given_up(steps)
        upper = _renyi(
            steps,
            lambda total, orders: rdp_to_delta(total, orders, max(0.0, epsilon - 2 * missed)),
            lambda one_hot: accountant.delta(one_hot, epsilon).lower,
        )
        # at epsilon 0 there is nothing to take the correction from: it is added to delta instead
        upper += 3 * missed
        whole = _unthinned(steps)
        if whole is not None:
            upper = min(upper, accountant.delta(whole, epsilon).upper)
        upper = min(upper, _drawn(steps))
        bound = _agreed(bound.lower, upper)
    return _attained(counts, bound)


def _attained(counts: Mapping[Plan, int], bound: Bound) -> Bound:
    """The bound, with nothing below where a step is charged as another that shows no less."""
    if any(isinstance(plan.noise, BOUNDED) for plan in counts):
        return Bound(lower=0.0, upper=bound.upper)
    return bound


def _agreed(lower: float, upper: float) -> Bound:
    """The bound between the ends that two accountants found; raises if they contradict each other."""
    if lower > upper * (1 + 1e-6) + 1e-9:
        raise ArithmeticError(
            f"a lower bound of {lower:g} and an upper bound of {upper:g} cannot both hold"
        )
    return Bound(lower=min(lower, upper), upper=upper)


def _given_up(steps: Mapping[Simple, int]) -> float:
    """What hidden trials that never end add to delta: docs/guarantees/selective.md, step 6."""
    return sum(count * step.given_up for step, count in steps.items() if isinstance(step, Trial))


def _basis(steps: Mapping[Simple, int]) -> Literal["proved", "published"]:
    claimed = any(isinstance(step, Trial) and step.accounting == "published" for step in steps)
    return "published" if claimed else "proved"


def _drawn(steps: Mapping[Simple, int]) -> float:
    """The chance that a record takes part at all, which delta never exceeds."""
    never = sum(n * math.log1p(-min(step.rate, 1 - 2.0**-53)) for step, n in steps.items())
    return min(1.0, -math.expm1(never) * (1 + 1e-12))


def _merged(counts: Mapping[Plan, int], dimension: Dimension) -> dict[Simple, int]:
    """How often each mechanism runs."""
    steps: Counter[Simple] = Counter()
    for plan, count in counts.items():
        size = dimension.get(plan) if isinstance(dimension, Mapping) else dimension
        step, often = mechanism(plan, size), check_count("steps", count, _WHY_WHOLE)
        if isinstance(step, Entrywise):
            steps[step.one] += check_count("steps", step.changed * often, _WHY_WHOLE)
        elif isinstance(step, TrainAndTest):
            steps[step.train] += often
            steps[step.test] += often
        else:
            steps[step] += often
    return {step: count for step, count in steps.items() if count}


def _one_hot(steps: Mapping[Simple, int]) -> dict[Step, int]:
    """The steps if a record changes one coordinate: all there is to them, but for coordinate-wise ones.

    For those it is one of the changes a record can make, so its cost bounds theirs from below; trials
    are left out, which bounds theirs too.
    """
    found: Counter[Step] = Counter()
    for step, count in steps.items():
        if isinstance(step, Trial):
            continue
        known = step.dominated_step if isinstance(step, CoordinateWise) else step
        if known is not None:
            found[known] += count
    return dict(found)


def _unthinned(steps: Mapping[Simple, int]) -> dict[Step, int] | None:
    """The steps with every coordinate, which show no less: docs/guarantees/twice-sampling.md, step 3.

    None where a step has no such form that a privacy loss distribution is known for.
    """
    found: Counter[Step] = Counter()
    for step, count in steps.items():
        if isinstance(step, Trial):
            return None
        whole = step.without_coordinate_sampling if isinstance(step, CoordinateWise) else step
        if whole is None:
            return None
        found[whole] += count
    return dict(found)


def _renyi(
    steps: Mapping[Simple, int],
    convert: Callable[[Array, Array], float],
    certain: Callable[[Mapping[Step, int]], float],
    ceiling: float = math.inf,
) -> float:
    """What Rényi divergences give for all steps: with sampling, or without it where that is less.

    Sampling never adds to a divergence (it is quasi-convex in the two laws), and without it there
    are more orders to choose from. `certain` is a lower bound that tells when this cannot help, and
    when the answer is beyond `ceiling`, which is all that is then said.
    """
    if not any(isinstance(step, CoordinateWise) for step in steps):
        return convert(*_total(steps, _TRIAL_ORDERS))
    unsampled: Counter[Simple] = Counter()
    for step, count in steps.items():
        whole = step if isinstance(step, Trial) else replace(step, rate=1.0)
        if isinstance(whole, CoordinateWise):
            whole = replace(whole, coordinate_rate=1.0)
        unsampled[whole] += count
    best = math.inf
    for few in _STAGES if unsampled != steps else ():
        total, orders = _total(steps, WHOLE_ORDERS[:few])
        best = min(best, convert(total, orders))
        if few == _STAGES[0] and best > ceiling and certain(_one_hot(steps)) > ceiling:
            return math.inf
        later = WHOLE_ORDERS[few:]
        if not len(later) or convert(_extrapolated(total, orders, later), later) >= best:
            break
    alone = _one_hot(unsampled)
    if not accountant.seems_beyond(alone, best) and certain(alone) < best:
        some = np.arange(0, len(ORDERS), _COARSE)
        total, orders = _total(unsampled, ORDERS[some])
        each = [convert(total[k : k + 1], orders[k : k + 1]) for k in range(len(some))]
        # any orders will do; the best ones are where the best of a few are
        near = some[int(np.argmin(each))]
        best = min(best, convert(*_total(unsampled, ORDERS[max(0, near - _COARSE) : near + _COARSE])))
    return best


def _extrapolated(divergences: Array, orders: Array, later: Array) -> Array:
    """Divergences at `later` orders if (a - 1) D_a went on as a straight line: being convex, no less.

    It decides only whether higher orders are worth working out. Bounds on D_a may lie higher at odd
    orders than at even ones (`Pair.POSITIVE`), so the flattest line through the last points counts.
    """
    if not np.isfinite(divergences[-_LAST:]).all():
        return np.full(len(later), np.inf)
    a, moments = orders[-_LAST:], ((orders - 1) * divergences)[-_LAST:]
    lines = [
        moments[k] + (moments[k] - moments[j]) / (a[k] - a[j]) * (later - a[k])
        for k in (len(a) - 2, len(a) - 1)
        for j in range(k)
    ]
    found: Array = np.maximum(np.min(lines, axis=0), 0.0) / (later - 1)
    return found


def _total(steps: Mapping[Simple, int], orders: Array) -> tuple[Array, Array]:
    """The Rényi divergences of all steps together, and their orders."""
    total = np.zeros(len(orders))
    for step, count in steps.items():
        total += count * _divergence(step, tuple(orders))
    return total, orders


@functools.lru_cache(maxsize=64)
def _divergence(step: Simple, orders: tuple[float, ...]) -> Array:
    if isinstance(step, SampledGaussian):
        return divergence(step, orders)
    if isinstance(step, Trial):
        return bounds.charged(step, np.array(orders))
    if isinstance(step, SampledNoise):
        alone = Block(step.beta, step.scale, SensitivitySet(p=1.0, norm=1.0, dimension=1))
        step = CoordinateWise(step.rate, (alone,))
    for block in step.blocks:
        if block.ball.dimension is None and block.ball.p > 2:
            raise InvalidValue(
                f"noise of exponent beta={block.beta:g} under l_{block.ball.p:g} clipping needs the "
                "dimension: a change spread over many coordinates costs more without end. Pass "
                "dimension=, the number of parameters, or clip with L2."
            )
    if any(block.ball.max_entry > block.scale * _BEYOND ** (1 / block.beta) for block in step.blocks):
        return np.full(len(orders), np.inf)
    blocks = [
        (
            CoordinateRDP(
                law=NoiseDensity(beta=block.beta, scale=block.scale), rate=step.coordinate_rate
            ),
            block.ball,
        )
        for block in step.blocks
    ]
    return coordinate_wise(blocks, step.rate, orders)
