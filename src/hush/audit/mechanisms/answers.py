"""Distinguishing attacks on releases outside of training: means, votes, moments and quantiles."""

import numpy as np
import torch
from torch import Tensor

from hush.accounting.epsilon import epsilon
from hush.accounting.ledger.ledger import Ledger
from hush.audit.lower_bound import Array, Audit, Draws, by_frequency, by_line, epsilon_lower_bound
from hush.audit.mechanisms.copies import STRENGTH
from hush.audit.mechanisms.distinguisher import DELTA, clipped, log_ratio
from hush.core.guarantee import Neighbours
from hush.core.plan import Plan
from hush.pate.argmax import NoisyMax
from hush.pate.confident import Confident
from hush.training.methods.mean import clipped_row_sum, mean
from hush.training.methods.moments import NoisyMoments
from hush.training.methods.quantile import NoisyQuantile

_ROWS = 500
"""Runs side by side: a record for each, written out in as many numbers."""
_CROWD = 5
"""Records beside the one in question, where a release needs some."""


def audit_mean(plan: Plan, *, runs: int = 4000, confidence: float, delta: float = DELTA) -> Audit:
    """`hush.mean` of rows, each of one number of its own; half of the numbers have no row."""
    source, found = torch.Generator().manual_seed(0), []
    for _ in range(-(-runs // _ROWS)):
        noisy = mean(_rows(), plan, delta=delta, generator=source).value
        found.append(noisy.reshape(2, _ROWS) * plan.sampling.expected(_ROWS))
    return _by_ratio(plan, np.concatenate(found, 1), None, delta, confidence)


def audit_number(plan: Plan, *, runs: int = 4000, confidence: float, delta: float = DELTA) -> Audit:
    """The clipped sums and noise of `hush.mean` of one number, for noise that is charged for one alone.

    `hush.mean` itself would take one call a run; these are the functions it calls, on many at once.
    """
    source, found = torch.Generator().manual_seed(0), []
    for _ in range(-(-runs // _ROWS)):
        rows = _rows()[plan.sampling.draw(_ROWS, source)]
        total = clipped_row_sum(rows, plan, source)
        noisy = plan.noise.privatize(total, norm=plan.clipping.reference_norm, generator=source)
        found.append(noisy.numpy().reshape(2, _ROWS))
    return _by_ratio(plan, np.concatenate(found, 1), 1, delta, confidence)


def audit_votes(
    query: NoisyMax | Confident,
    *,
    queries: int = 4,
    runs: int = 10_000,
    confidence: float,
    delta: float = DELTA,
) -> Audit:
    """Answers to queries whose scores are close: each record moves the largest to another place."""
    vote = query if isinstance(query, NoisyMax) else query.vote
    if vote.neighbours is Neighbours.REPLACE or vote.unit == "one record":
        present, absent = [_CROWD + 1.0, _CROWD - 1.0], [float(_CROWD), float(_CROWD)]
    else:
        present, absent = [_CROWD + 1.0, float(_CROWD)], [float(_CROWD), float(_CROWD)]
    source = torch.Generator().manual_seed(0)

    def outcomes(scores: list[float]) -> Array:
        answers = query(torch.tensor([scores]).expand(runs * queries, -1), source).view(runs, queries)
        # how often each answer was given: queries are alike, so their order says nothing
        counts = torch.stack([(answers == kind).sum(1) for kind in (0, 1)])
        return (counts[0] * (queries + 1) + counts[1]).double().numpy()

    scores = by_frequency(Draws(present=outcomes(present), absent=outcomes(absent)))
    charge = query.guarantee(queries, delta).epsilon.upper
    lower = epsilon_lower_bound(scores, delta, confidence)
    return Audit(lower=lower, charge=charge, delta=delta, confidence=confidence, runs=runs // 2)


def audit_moments(
    moments: NoisyMoments, *, runs: int = 4000, confidence: float, delta: float = DELTA
) -> Audit:
    """Both noisy sums, as far as mean and variance show them, of channels with a record each."""
    ledger, source, found = Ledger(None), torch.Generator().manual_seed(0), []
    for _ in range(-(-runs // _ROWS)):
        noisy = moments(_rows(), ledger, generator=source)
        both = torch.stack([noisy.mean, noisy.variance + noisy.mean**2], 1).numpy()
        found.append(both.reshape(2, _ROWS, 2))
    present, absent = np.concatenate(found, 1)
    lower = epsilon_lower_bound(by_line(Draws(present=present, absent=absent)), delta, confidence)
    charge = moments.guarantee(delta).epsilon.upper
    return Audit(lower=lower, charge=charge, delta=delta, confidence=confidence, runs=len(present) // 2)


def audit_quantile(
    quantile: NoisyQuantile, *, runs: int = 4000, confidence: float, delta: float = DELTA
) -> Audit:
    """The median of norms that are few: one more record may move it. A block is a run."""
    source = torch.Generator().manual_seed(0)

    def released(records: int) -> Array:
        norms = torch.full((records, runs), 0.5 * quantile.low)
        norms[: records // 2] = 2 * quantile.high
        return np.array(quantile(norms, 0.5, Ledger(None), generator=source))

    scores = by_frequency(Draws(present=released(2), absent=released(1)))
    lower = epsilon_lower_bound(scores, delta, confidence)
    charge = quantile.guarantee(blocks=1, delta=delta).epsilon.upper
    return Audit(lower=lower, charge=charge, delta=delta, confidence=confidence, runs=runs // 2)


def _rows() -> Tensor:
    """A record for each of the first half of the numbers."""
    return torch.cat([STRENGTH * torch.eye(_ROWS), torch.zeros(_ROWS, _ROWS)], 1).double()


def _by_ratio(plan: Plan, found: Array, dimension: int | None, delta: float, confidence: float) -> Audit:
    shift = clipped(plan, 1)
    present, absent = (log_ratio(plan, part[:, None], shift, 0 * shift) for part in found)
    lower = epsilon_lower_bound(Draws(present=present, absent=absent), delta, confidence)
    charge = epsilon(plan, 1, delta, dimension=dimension).epsilon.upper
    return Audit(lower=lower, charge=charge, delta=delta, confidence=confidence, runs=len(present) // 2)
