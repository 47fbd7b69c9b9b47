"""What a selective trial costs: a proposal, a noisy test, and the model only if it is accepted.

**Guarantee.** docs/guarantees/selective.md. All bounds hold at every order above 1 and for both
directions of adding and removing one record.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr

from hush.accounting.numerics import OUTWARD, Array, bisect, log_convex_remainder, log_mixture_ratio
from hush.accounting.pld.privacy_loss import Direction
from hush.accounting.rdp.gaussian import divergence
from hush.accounting.selective.dominating_pair import (
    dominating_pair,
    hockey_stick,
    log_below,
    log_beyond,
)
from hush.accounting.selective.trial import Trial

# Beyond this order the corner bounds are not worked out: no epsilon is decided there.
_HIGHEST = 1024.0
_OUTWARD = 1 + 1e-9
_ROUNDS = 100


@dataclass(frozen=True, eq=False)
class _Corners:
    """The extreme pairs of acceptance without the record and with it in the test batch.

    `log_mass` is log t and `log_gain` log k of the guarantee page, one entry a corner.
    """

    log_mass: Array
    log_gain: Array


def charged(trial: Trial, orders: npt.ArrayLike) -> Array:
    """The Rényi divergence that one step of the trial is charged."""
    ways = {"per-trial": per_trial, "per-acceptance": per_acceptance, "published": published}
    return ways[trial.accounting](trial, orders)


def published(trial: Trial, orders: npt.ArrayLike) -> Array:
    """What the paper says an accepted update costs: the two sampled Gaussians. Not a guarantee."""
    return divergence(trial.train, orders) + divergence(trial.test, orders)


def per_trial(trial: Trial, orders: npt.ArrayLike) -> Array:
    """The Rényi divergence of one trial, every verdict public: an upper bound at each order."""
    wanted = np.atleast_1d(np.asarray(orders, dtype=float))
    # The verdict is a function of the noisy number: publishing that costs the composition.
    composed = divergence(trial.train, wanted) + divergence(trial.test, wanted)
    corner = np.array([_per_trial(trial, float(order)) for order in wanted])
    least: Array = np.minimum(composed, corner)
    return least


def per_acceptance(trial: Trial, orders: npt.ArrayLike) -> Array:
    """The Rényi divergence of one accepted update, its number of trials hidden: an upper bound."""
    wanted = np.atleast_1d(np.asarray(orders, dtype=float))
    return np.array([_per_acceptance(trial, float(order)) for order in wanted])


@lru_cache(maxsize=65536)
def _per_trial(trial: Trial, order: float) -> float:
    if order > _HIGHEST:
        return math.inf
    accepted = max(_log_accepted(trial, order, direction) for direction in Direction)
    excess = np.logaddexp(accepted, _log_rejected(trial, order))
    return float(np.logaddexp(0.0, excess)) / (order - 1) * _OUTWARD


def _log_accepted(trial: Trial, order: float, direction: Direction) -> float:
    """log E_Q of the largest corner: what the accepted models add to the moment."""
    found = dominating_pair(trial.train, order)
    corners = _corners(trial, direction)
    ratio = corners.log_gain[:, None] + found.log_ratio * _sign(direction)
    value = corners.log_mass[:, None] + log_convex_remainder(ratio, order)
    if direction is Direction.ADD:
        value += found.log_ratio
    inside = np.logaddexp.reduce(found.log_weight + value.max(axis=0))
    return float(np.logaddexp(inside, _log_tails(trial, order, direction, 0.0)))


def _log_tails(trial: Trial, order: float, direction: Direction, log_scale: float) -> float:
    """What corners add beyond the dots, if their ratio is multiplied by exp(log_scale).

    g(y) <= y^a + a - 1, and no corner's mass t exceeds 1.
    """
    train = trial.train
    found = dominating_pair(train, order)
    most = order * (max(0.0, float(_corners(trial, direction).log_gain.max()) + log_scale))
    flat = math.log(order - 1)
    outside = [
        float(log_ndtr(found.low / train.multiplier)),
        float(log_ndtr(-found.high / train.multiplier)),
        float(log_ndtr((1 - found.high) / train.multiplier)),
    ]
    near = [most + float(np.logaddexp(0.0, flat)) + mass for mass in outside]
    if direction is Direction.REMOVE:
        far = most + log_beyond(train, order, found.high)
    else:
        far = most + log_below(train, order, found.low)
    return float(np.logaddexp.reduce([*near, far]))


def _log_rejected(trial: Trial, order: float) -> float:
    """The log of what the rejections add: y g(z/y), where y and z are the two chances of rejection."""
    if trial.test.rate == 1:
        change = 1.0
    else:
        stick = hockey_stick(trial.train, 1 / (1 - trial.test.rate))
        change = trial.test.rate + (1 - trial.test.rate) * stick
    least, most = trial.accept
    change *= most - least
    if trial.reject <= 0:
        return math.inf
    up = math.log1p(change / trial.reject)
    risen = math.log(trial.reject) + log_convex_remainder(np.array([up]), order)
    fallen = math.log(trial.reject + change) + log_convex_remainder(np.array([-up]), order)
    return float(np.maximum(risen, fallen)[0])


def _sign(direction: Direction) -> int:
    """Whether the ratio counts as it is (the record is in the first law) or inverted."""
    return 1 if direction is Direction.REMOVE else -1


def _corners(trial: Trial, direction: Direction) -> _Corners:
    log_least, log_most = trial.log_accept
    # a' and b both least, both most, (m, M) and (M, m); a = (1 - rate) a' + rate b
    log_without = np.array([log_least, log_most, log_least, log_most])
    gap = log_most - log_least
    log_change = np.append([0.0, 0.0], log_mixture_ratio(trial.test.rate, np.array([gap, -gap])))
    if direction is Direction.REMOVE:
        return _Corners(log_without, log_change)
    return _Corners(log_without + log_change, -log_change)


@lru_cache(maxsize=65536)
def _per_acceptance(trial: Trial, order: float) -> float:
    if order > _HIGHEST or trial.accept[0] <= 0:
        return math.inf
    low, high = (math.log(end) for end in acceptance_change(trial))
    excess = max(
        *(_worst_ratio(trial, order, Direction.REMOVE, -scale) for scale in (low, high)),
        *(_worst_ratio(trial, order, Direction.ADD, scale) for scale in (low, high)),
    )
    return math.log1p(excess) / (order - 1) * _OUTWARD


def _worst_ratio(trial: Trial, order: float, direction: Direction, log_scale: float) -> float:
    """No less than sup E[t g(ratio k scale)] / E[t], by Dinkelbach's iteration over the corners."""
    found, corners = dominating_pair(trial.train, order), _corners(trial, direction)
    log_weight = found.log_weight + (0 if direction is Direction.REMOVE else 1) * found.log_ratio
    ratio = corners.log_gain[:, None] + found.log_ratio * _sign(direction) + log_scale
    log_mass = corners.log_mass[:, None] + log_weight
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        mass, gain = np.exp(log_mass), np.exp(log_mass + log_convex_remainder(ratio, order))
        if not np.isfinite(gain).all():
            return math.inf
        columns = np.arange(gain.shape[1])
        worst = 0.0
        for _ in range(_ROUNDS):
            chosen = np.argmax(gain - worst * mass, axis=0)
            tried = float(gain[chosen, columns].sum() / mass[chosen, columns].sum())
            if tried <= worst * (1 + 1e-13):
                break
            worst = tried
        rest = float((gain - worst * mass).max(axis=0).sum())
        # E[t] >= m, so whatever the last round left over adds at most that much over m.
        tails = math.exp(min(_log_tails(trial, order, direction, log_scale), 700.0))
    least = min(trial.accept[0], math.exp(float(corners.log_mass.min())))
    return worst + (max(rest, 0.0) + tails) / least


@lru_cache(maxsize=4096)
def acceptance_change(trial: Trial) -> tuple[float, float]:
    """The least and the largest ratio of the chances of acceptance with the record and without.

    Rounded outward; docs/guarantees/selective.md, step 5, has the two equations.
    """
    least, most = trial.accept
    rate, stay = trial.test.rate, 1 - trial.test.rate
    widest = most / least
    if rate == 1:
        return 1 / widest, widest

    def spread(ratio: float) -> float:
        return stay * (most - least) * hockey_stick(trial.train, ratio / stay)

    _, high = bisect(lambda c: rate * most + spread(c) > least * (c - stay), 1.0, widest, rounds=_ROUNDS)
    _, low = bisect(
        lambda c: rate * least - spread(c) < most * (c - stay), 1.0, 1 / widest, rounds=_ROUNDS
    )
    return low * (1 - 1e-12), high * OUTWARD
