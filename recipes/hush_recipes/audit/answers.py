"""Distinguishing attacks on other releases than steps: means, votes, moments, quantiles, descents."""

import numpy as np
import torch
from torch import Tensor, nn

from hush.accounting.epsilon import epsilon
from hush.accounting.ledger import Ledger
from hush.audit.lower_bound import Array
from hush.core.guarantee import Budget, Neighbours
from hush.core.plan import Plan
from hush.pate.argmax import Confident, NoisyMax
from hush.training.methods.statistics import clipped_row_sum, mean
from hush_recipes.audit.copies import STRENGTH
from hush_recipes.audit.distinguisher import DELTA, clipped, log_ratio
from hush_recipes.audit.scores import Audit, Draws, by_line, by_trees
from hush_recipes.audit.whole_steps import TURN, opposed_loss, opposed_records
from hush_recipes.dpsur.adaptive import Adaptive, AdaptiveDescent
from hush_recipes.statistics.moments import NoisyMoments
from hush_recipes.statistics.quantile import NoisyQuantile

_ROWS = 500
"""Runs side by side: a record for each, written out in as many numbers."""
_CROWD = 5
"""Records beside the one in question, where a release needs some."""


def attack_mean(plan: Plan, *, runs: int = 4000, confidence: float, delta: float = DELTA) -> Audit:
    """`hush.mean` of rows, each of one number of its own; half of the numbers have no row."""
    source, sums = torch.Generator().manual_seed(0), []
    for _ in range(-(-runs // _ROWS)):
        # the delta of its own guarantee, which is not what is attacked
        noisy = mean(_rows(), plan, delta=1e-5, generator=source).value
        sums.append(noisy.reshape(2, _ROWS) * plan.sampling.expected(_ROWS))
    return _by_ratio(plan, np.concatenate(sums, 1), None, delta, confidence)


def attack_number(plan: Plan, *, runs: int = 4000, confidence: float, delta: float = DELTA) -> Audit:
    """The clipped sums and noise of `hush.mean` of one number, for noise that is charged for one alone.

    `hush.mean` itself would take one call a run; these are the functions it calls, on many at once.
    """
    source, sums = torch.Generator().manual_seed(0), []
    for _ in range(-(-runs // _ROWS)):
        rows = _rows()[plan.sampling.draw(_ROWS, source)]
        total = clipped_row_sum(rows, plan, source)
        noisy = plan.noise.privatize(total, norm=plan.clipping.reference_norm, generator=source)
        sums.append(noisy.numpy().reshape(2, _ROWS))
    return _by_ratio(plan, np.concatenate(sums, 1), 1, delta, confidence)


def attack_votes(
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
    return Audit.of(scores, query.guarantee(queries, delta).epsilon.upper, delta, confidence)


def attack_moments(
    moments: NoisyMoments, *, runs: int = 4000, confidence: float, delta: float = DELTA
) -> Audit:
    """Both noisy sums, as far as mean and variance show them, of channels with a record each."""
    ledger, source, sums = Ledger(None), torch.Generator().manual_seed(0), []
    for _ in range(-(-runs // _ROWS)):
        noisy = moments(_rows(), ledger, generator=source)
        statistics = torch.stack([noisy.mean, noisy.variance + noisy.mean**2], 1).numpy()
        sums.append(statistics.reshape(2, _ROWS, 2))
    present, absent = np.concatenate(sums, 1)
    scores = by_line(Draws(present=present, absent=absent))
    return Audit.of(scores, moments.guarantee(delta).epsilon.upper, delta, confidence)


def attack_quantile(
    quantile: NoisyQuantile, *, runs: int = 4000, confidence: float, delta: float = DELTA
) -> Audit:
    """The median of norms that are few: one more record may move it. A block is a run."""
    source = torch.Generator().manual_seed(0)

    def released(records: int) -> Array:
        norms = torch.full((records, runs), 0.5 * quantile.low)
        norms[: records // 2] = 2 * quantile.high
        return np.array(quantile(norms, 0.5, Ledger(None), generator=source))

    scores = by_frequency(Draws(present=released(2), absent=released(1)))
    charge = quantile.guarantee(blocks=1, delta=delta).epsilon.upper
    return Audit.of(scores, charge, delta, confidence)


def attack_descent(
    *, runs: int = 100, delta: float = DELTA, confidence: float = 0.95, seed: int = 0
) -> Audit:
    """An attack on whole runs of `AdaptiveDescent` with a budget of epsilon 3."""
    charges = []

    def descents(pull: float, turn: float, seed: int) -> np.ndarray:
        source, outputs = torch.Generator().manual_seed(seed), []
        for _ in range(runs):
            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            descent = AdaptiveDescent(
                model,
                opposed_loss,
                opposed_records(1, pull, turn),
                Budget(epsilon=3.0, delta=delta),
                Adaptive(clip=1.0, sizes=2, splits=1),
                generator=source,
                physical_batch=2,
            )
            moves = list(descent.run())
            charges.append(descent.spent(delta).epsilon.upper)
            outputs.append([float(len(moves)), float(model.weight.detach())])
        return np.array(outputs)

    outputs = Draws(present=descents(STRENGTH, 2 * TURN, seed), absent=descents(0.0, 0.0, seed + 1))
    # what a descent spends is its budget, whatever happened
    return Audit.of(by_trees(outputs), min(charges), delta, confidence)


def by_frequency(outcomes: Draws) -> Draws:
    """Scores of outcomes that are few: how much more frequent each is with the record."""
    kinds, numbers = np.unique(np.concatenate([outcomes.present, outcomes.absent]), return_inverse=True)
    present, absent = np.split(numbers, [len(outcomes.present)])
    with_record, without = (np.bincount(part[::2], minlength=len(kinds)) for part in (present, absent))
    scores = np.log((with_record + 0.5) / (without + 0.5))
    return Draws(present=scores[present], absent=scores[absent])


def _rows() -> Tensor:
    """A record for each of the first half of the numbers."""
    return torch.cat([STRENGTH * torch.eye(_ROWS), torch.zeros(_ROWS, _ROWS)], 1).double()


def _by_ratio(plan: Plan, sums: Array, dimension: int | None, delta: float, confidence: float) -> Audit:
    shift = clipped(plan, 1)
    present, absent = (log_ratio(plan, part[:, None], shift, 0 * shift) for part in sums)
    charge = epsilon(plan, 1, delta, dimension=dimension).epsilon.upper
    return Audit.of(Draws(present=present, absent=absent), charge, delta, confidence)
