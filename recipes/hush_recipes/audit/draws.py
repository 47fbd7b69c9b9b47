"""Checks of the sampling of records or users, with exact p-values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from hush.core.errors import Unsupported
from hush.training.data import Batch, Data
from hush.training.methods.selective import Trials
from hush.training.rehearsal import rehearsal
from hush.training.step import PrivateStep

Array = npt.NDArray[np.float64]
UnitNumbers = npt.NDArray[np.int64]
LEVEL = 1e-6
"""Significance level of a check: a correct step fails once in a million."""
_DRAWS = 400
_LAGS = 200  # number of distances at which pairs of records are compared, besides half of the records
_FAR = 1.5  # deviations from the mean that define an outlier; most sensitive to a doubled variance


@dataclass(frozen=True, kw_only=True)
class Check:
    """Result of a check: its p-value under the charged plan."""

    name: str
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value >= LEVEL


def draws_independent(step: PrivateStep, data: Data, draws: int = _DRAWS) -> Check:
    """Check that records are drawn at the plan's rate, independently across records and steps.

    For user-level privacy, users are checked instead, and a batch must have at most `per_unit` distinct
    consecutive records of a user. The batches of several ranks are combined. The step is unchanged.
    """
    empty, drawn = Batch(torch.arange(0), data, 1), []
    with rehearsal(step):
        for _ in range(draws):
            batch = step.draw(empty)
            # draws within a period depend on each other
            step.steps += step.plan.sampling.period
            if step.reducer.size > 1:  # concatenated in the order of ranks
                own = step.reducer.share(batch)
                shares = step.reducer.gather("the draws", (own.indices.cpu(), own.counts))
                counts = None if own.counts is None else torch.cat([counts for _, counts in shares])
                slots = torch.cat([slots for slots, _ in shares])
                batch = replace(batch, indices=slots, counts=counts)
            drawn.append(_units_drawn(step, batch))
    units, sampling = number_of_units(step, data), step.plan.sampling
    candidates = sampling.candidates(units, step.steps)
    p_value = _coin_table(drawn, units, sampling.step_participation, candidates)
    return Check(name="sampling", p_value=p_value)


def fresh_test_batches(step: PrivateStep, data: Data, draws: int = _DRAWS) -> Check:
    """Check that a test batch is drawn at its rate, independently of the training batch.

    The number of records (or users) in both batches is binomial with the product of the rates.
    """
    trials = trials_of(step)
    empty, overlap, tested = Batch(torch.arange(0), data, 1), 0, []
    with rehearsal(step):
        for _ in range(draws):
            batch = step.draw(empty)
            trained, numbers = _units_drawn(step, batch), _units_drawn(step, trials.draw_test(batch))
            tested.append(numbers)
            if trained is not None and numbers is not None:
                overlap += int(np.isin(trained, numbers).sum())
    rate, units = trials.release.rate, number_of_units(step, data)
    joint = stats.binomtest(overlap, draws * units, step.plan.sampling.participation * rate).pvalue
    p_value = bonferroni([joint, _coin_table(tested, units, rate, range(units))])
    return Check(name="sampling of the test", p_value=p_value)


def noisy_verdicts(step: PrivateStep, tries: int = _DRAWS) -> Check:
    """Check the noise of the verdict of a selective test.

    A loss difference one standard deviation below (above) the threshold is accepted with probability
    Phi(1) (Phi(-1)).
    """
    trials, by_side = trials_of(step), []
    release = trials.release
    deviation = release.multiplier * release.clip * (2 if release.test == "mean" else 1)
    with rehearsal(step):
        for side in (-1.0, 1.0):
            at = release.threshold * release.clip + side * deviation
            rises = torch.full((tries,), at, dtype=torch.float64, device=step.device)
            accepted = sum(trials.noisy_verdict(each) for each in rises)
            by_side.append(stats.binomtest(accepted, tries, float(stats.norm.cdf(-side))).pvalue)
    return Check(name="noise of the verdict", p_value=bonferroni(by_side))


def trials_of(step: PrivateStep) -> Trials:
    """Trials of a step with a `Selective` plan."""
    if not isinstance(step.rule, Trials):
        raise Unsupported("this step is not selective: pass a step of a plan with release=Selective.")
    return step.rule


def number_of_units(step: PrivateStep, data: Data) -> int:
    """Number of records or users to draw from."""
    return step.reducer.slots(data) if step.units is None else len(step.units)


def batch_of_units(step: PrivateStep, number: int, data: Data, physical: int) -> Batch:
    """Batch of the users with the most records, at most `per_unit` records each."""
    if step.units is None:
        return Batch(torch.arange(number), data, physical)
    largest = step.units.counts.argsort(descending=True, stable=True)[:number]
    slots, counts = step.units.draw(largest, step.generator)
    return Batch(slots, data, physical, counts=counts)


def _units_drawn(step: PrivateStep, batch: Batch) -> UnitNumbers | None:
    """Numbers of the records or users in a batch.

    None unless each user has 1 to `per_unit` distinct consecutive records.
    """
    slots = batch.indices.cpu()
    if step.units is None:
        return np.asarray(slots.numpy())
    if batch.counts is None or int(batch.counts.sum()) != len(slots):
        return None
    counts, owners = batch.counts.cpu(), step.units.owners[slots]
    units = owners[counts.cumsum(0) - counts]
    few = bool(((counts >= 1) & (counts <= step.units.per_unit)).all())
    own = torch.equal(owners, units.repeat_interleave(counts))
    return np.asarray(units.numpy()) if few and own and len(slots.unique()) == len(slots) else None


def _coin_table(
    drawn: Sequence[UnitNumbers | None], units: int, rate: float, candidates: range
) -> float:
    """P-value of independent draws of the candidates; 0 for repeated or invalid draws."""
    counts = [None if numbers is None else np.bincount(numbers, minlength=units) for numbers in drawn]
    if any(row is None or row.max(initial=0) > 1 for row in counts):
        return 0.0
    table = np.array(counts) > 0
    if table.sum() > table[:, candidates].sum():
        return 0.0
    return coins(table[:, candidates], rate)


def coins(table: npt.NDArray[np.bool_], rate: float) -> float:
    """P-value of independent coins: total, variance over rows and columns, and pairs."""
    if rate == 1:
        return float(table.all())
    number = float(stats.binomtest(int(table.sum()), table.size, rate).pvalue)
    spread = [sizes(table.sum(axis), table.shape[axis], rate) for axis in (0, 1)]
    return bonferroni([number, *spread, joint_draws(table, rate), joint_draws(table.T, rate)])


def joint_draws(table: npt.NDArray[np.bool_], rate: float) -> float:
    """P-value of independence between columns (records or users).

    At each distance the columns form disjoint pairs, in two ways. The number of pairs drawn together
    over all rows (steps) is binomial(pairs, rate^2).
    """
    units = table.shape[1]
    together, pairs = [], []
    for lag in sorted({*range(1, min(units, _LAGS + 1)), units // 2} - {0}):
        drawn_together = table[:, lag:] & table[:, :-lag]
        turn = np.arange(units - lag) // lag % 2
        for first in (0, 1):
            if (turn == first).any():
                together.append(drawn_together[:, turn == first].sum())
                pairs.append(len(table) * (turn == first).sum())
    heads, law = np.array(together), stats.binom(np.array(pairs), rate**2)
    return bonferroni([law.cdf(heads), law.sf(heads - 1)]) if pairs else 1.0


def sizes(counts: Array, thrown: int, rate: float) -> float:
    """P-value of the number of outliers among binomial counts of `thrown` coins each."""
    law = stats.binom(thrown, rate)
    reach = _FAR * math.sqrt(thrown * rate * (1 - rate))
    low, high = math.ceil(thrown * rate - reach), math.floor(thrown * rate + reach)
    chance = float(law.cdf(low - 1) + law.sf(high))
    far = int(((counts < low) | (counts > high)).sum())
    return float(stats.binomtest(far, len(counts), chance).pvalue)


def bonferroni(p_values: npt.ArrayLike) -> float:
    """Bonferroni-corrected p-value, valid for any dependence."""
    several = np.asarray(p_values)
    return min(1.0, float(several.size * several.min(initial=1.0)))
