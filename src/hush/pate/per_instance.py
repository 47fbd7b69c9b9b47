"""Per-instance RDP of noisy votes (**sensitive**), which is low if the teachers agree."""

import math
from dataclasses import replace

import numpy as np
from scipy.special import log_ndtr
from torch import Tensor

from hush.accounting.mechanism import mechanism
from hush.accounting.numerics import OUTWARD, Array, log1mexp_relative
from hush.accounting.rdp.conversion import ORDERS, rdp_to_epsilon
from hush.accounting.steps import SampledGaussian
from hush.core.errors import Unproved
from hush.core.guarantee import DELTA, Bound, Guarantee
from hush.core.plan import Plan
from hush.noise import Gaussian
from hush.pate.argmax import Confident, NoisyMax, Query, as_scores, charged, planned

# bounds the absolute error of the closed forms below; `OUTWARD` bounds the relative error
_ROUNDING = 1e-12


def per_instance(query: Query, scores: Tensor, delta: float, answers: int | None = None) -> Guarantee:
    """Per-instance guarantee for at most `answers` answers to the rows of `scores`; for Gaussian noise.

    **Guarantee** (sensitive). Valid for all neighbours of these scores, in both directions, and at most
    the data-independent privacy cost: docs/guarantees/argmax.md, step 4.
    """
    delta = DELTA["range"].check("delta", delta)
    total = divergences(query, scores, ORDERS).sum(0)
    plans = planned(query, len(scores), len(scores) if answers is None else answers)
    worst = charged(query.vote, plans, delta)
    upper = min(rdp_to_epsilon(total, ORDERS, delta), worst.epsilon.upper)
    return replace(
        worst,
        epsilon=Bound(lower=0.0, upper=upper),
        notion="per-instance",
        arithmetic="assumed",  # the bound is for unrounded scores
        sensitive=True,
    )


def divergences(query: Query, scores: Tensor, orders: Array) -> Array:
    """Upper bounds on the Rényi divergences between the answers for neighbouring scores.

    The result has one row per query and one column per order.
    """
    rows = as_scores(scores).numpy()
    return _vote(query, rows, orders) if isinstance(query, NoisyMax) else _confident(query, rows, orders)


def runner_up(scores: Array, deviation: float) -> Array:
    """Union bound on the log-probability that noise changes which score is the largest."""
    sorted_scores = np.sort(scores, axis=1)
    gaps = sorted_scores[:, -1:] - sorted_scores[:, :-1]
    overtaken = log_ndtr(-gaps / (math.sqrt(2) * deviation))
    union: Array = np.logaddexp.reduce(overtaken, axis=1)
    return np.minimum(union, 0.0)


def _vote(vote: NoisyMax, scores: Array, orders: Array) -> Array:
    """Step 4 of the proof: the answer changes with probability at most q, and D_a is at most t^2 a."""
    deviation, step = _deviation(vote.plan), mechanism(vote.plan)
    assert isinstance(step, SampledGaussian)
    t = 1 / (math.sqrt(2) * step.multiplier)
    log_q = runner_up(scores, deviation)[:, None]
    r, a = np.sqrt(-log_q), orders[None, :]
    worst = np.broadcast_to(a * t**2, (len(scores), len(orders)))
    valid = r >= a * t
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        # log(1 - x) for the probabilities x: q for these scores, between w and u for the neighbour
        stays = log1mexp_relative(log_q)
        upper, lower = log1mexp_relative(-((r - t) ** 2)), log1mexp_relative(-((r + t) ** 2))
        forward = np.where((r - t) / r * np.exp(2 * r * t - t**2) >= a / (a - 1), a * stays, 0.0)
        backward = np.where((r + t) / r * np.exp(-2 * r * t - t**2) <= (a - 1) / a, a * lower, 0.0)
        forward = np.logaddexp(forward - (a - 1) * upper, a * (a - 1) * t**2 - (r - (a - 1) * t) ** 2)
        backward = np.logaddexp(backward - (a - 1) * stays, a * (a - 1) * t**2 - (r - a * t) ** 2)
        bound = _outward(np.maximum(forward, backward), a)
    return np.where(valid & (bound < worst), bound, worst)


def _confident(query: Confident, scores: Array, orders: Array) -> Array:
    """Step 5 of the proof: the two outcomes of the test, and the answer if the test passes."""
    deviation = _deviation(query.test)
    answer = (orders - 1) * _vote(query.vote, scores, orders)
    margin = (scores.max(1) - query.threshold)[:, None] / deviation
    a, moved = orders[None, :], query.test.clipping.reference_norm / deviation
    worst = np.full(answer.shape, -np.inf)
    for neighbour in (margin - moved, margin + moved):
        for p, q in ((margin, neighbour), (neighbour, margin)):
            passed = a * log_ndtr(p) + (1 - a) * log_ndtr(q) + answer
            failed = a * log_ndtr(-p) + (1 - a) * log_ndtr(-q)
            worst = np.maximum(worst, np.logaddexp(passed, failed))
    return _outward(worst, a)


def _outward(log_moments: Array, orders: Array) -> Array:
    """Rényi divergences from log-moments, rounded up."""
    divergences: Array = (np.maximum(log_moments, 0.0) * OUTWARD + _ROUNDING) / (orders - 1)
    return divergences


def _deviation(plan: Plan) -> float:
    if not isinstance(plan.noise, Gaussian):
        raise Unproved(
            f"{type(plan.noise).__name__} noise has no per-instance cost: the proof is for Gaussian "
            "noise. Use Gaussian noise, or the data-independent guarantee."
        )
    return plan.noise.multiplier * plan.clipping.reference_norm
