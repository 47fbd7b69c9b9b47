"""Checks that a private step does what is charged, for a test suite: exact laws, p-values.

Each takes a step as it is and data that need no protection: nothing here is charged for as a release.
A check that passes says that nothing was found at this size; docs/guarantees/audit.md says what can be.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats
from torch import Tensor, nn

from hush.audit import copies
from hush.clipping import Importance, Linf
from hush.core.errors import Unsupported
from hush.core.kind import check_kind
from hush.core.number import check_count
from hush.core.part import Sampling
from hush.core.plan import Plan
from hush.gradients.structure import each
from hush.noise import Gaussian, GeneralizedGaussian, Laplace
from hush.training.batch import Batch
from hush.training.records import Data
from hush.training.step import PrivateStep

LEVEL = 1e-6
"""A check fails below this p-value: of a million that should pass, one fails by chance."""
_ROUNDED = 1e-3
_APART = 200
"""Rows that are compared are at most so far apart, or half of them all."""
Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was looked at, and how likely so much is by chance if the step does what is charged."""

    name: str
    p_value: float

    @property
    def passed(self) -> bool:
        return self.p_value >= LEVEL


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Some steps: who was drawn for each, and the noise in each noisy sum in units of its scale."""

    plan: Plan
    records: int
    drawn: list[Tensor]
    noise: Array
    """A row for each step."""
    exponent: float
    """Its density is proportional to exp(-|x|^exponent)."""


def observe(step: PrivateStep, data: Data, steps: int) -> Observed:
    """Run so many steps, two at least, and keep what they drew; the model moves as it would."""
    check_count("steps", steps, "one step says nothing of another", at_least=2)
    exponents, scales = _law(step)
    drawn, noise = [], []
    for batch in step.batches(data, steps=steps):
        before = clipped_sum(step, batch)
        step(batch)
        given = [value.grad for value in step._trainable().values() if value.grad is not None]
        update = torch.cat([value.reshape(-1) for value in given]).double().cpu()
        drawn.append(batch.indices)
        noise.append((update * step.plan.sampling.expected(step.records) - before).numpy() / scales)
    return Observed(
        plan=step.plan,
        records=step.records,
        drawn=drawn,
        noise=np.array(noise),
        exponent=exponents,
    )


def clipped_sum(step: PrivateStep, batch: Batch) -> Tensor:
    """What a step adds noise to, all records at once whatever the physical batch is."""
    total = torch.zeros(step._size(), dtype=torch.float64)
    for inputs, targets in Batch(batch.indices, batch.data, max(1, len(batch))):
        clipped = step._clipped(each(inputs, step._here), each(targets, step._here), None)
        total += torch.cat([part.reshape(-1) for part in clipped.total.values()]).double().cpu()
    return total


def noise_scale(seen: Observed) -> Check:
    """Whether there is as much noise as is charged: the sum of |x|^exponent has a gamma law, exactly."""
    total = float((np.abs(seen.noise) ** seen.exponent).sum())
    law = stats.gamma(seen.noise.size / seen.exponent)
    return Check(name="noise scale", p_value=_two_sided(law.cdf(total), law.sf(total)))


def noise_law(seen: Observed) -> Check:
    """Whether the noise has the law that is charged, and each number its share (exact gamma laws)."""
    law = stats.gamma(len(seen.noise) / seen.exponent)
    totals = (np.abs(seen.noise) ** seen.exponent).sum(0)
    each_number = min(map(_two_sided, law.cdf(totals), law.sf(totals))) * totals.size
    together = float(stats.kstest(seen.noise.ravel(), stats.gennorm(seen.exponent).cdf).pvalue)
    return Check(name="law of the noise", p_value=min(1.0, 2 * min(each_number, together)))


def noise_fresh(seen: Observed) -> Check:
    """Whether the noise of a step says nothing of a later step's."""
    return Check(name="noise of other steps", p_value=_repeats(seen.noise))


def noise_apart(seen: Observed) -> Check:
    """Whether the noise of a number says nothing of another number's in the same step."""
    return Check(name="noise of other numbers", p_value=_repeats(seen.noise.T))


def draws_poisson(seen: Observed) -> Check:
    """Whether each record is drawn with the chance charged, on its own and anew at each step."""
    rate, steps = seen.plan.sampling.participation, len(seen.drawn)
    taken = np.zeros((steps, seen.records))
    for row, indices in zip(taken, seen.drawn, strict=True):
        np.add.at(row, indices.cpu().numpy(), 1)
    p_value = _coins(taken, rate) if taken.max(initial=0) <= 1 else 0.0  # nobody takes part twice
    return Check(name="draws of records", p_value=p_value)


def masks_independent(
    sampling: Sampling, *, records: int = 250, numbers: int = 40, seed: int = 0
) -> Check:
    """Whether each number of each record that takes part is kept with the chance charged, on its own.

    A private step shows its masks where there is next to no noise: of records that move numbers of
    their own, one by one; of records that all move the same numbers, how many are kept of each.
    """
    check_kind("sampling", sampling, Sampling)  # type: ignore[type-abstract]
    rate = sampling.thinning
    if rate == 1:
        raise Unsupported(
            f"{type(sampling).__name__} samples no coordinates, so there are no masks to look at. Pass "
            "Coordinate or Twice."
        )
    plan = Plan(sampling=sampling, clipping=Linf(norm=1.0), noise=Gaussian(multiplier=1e-3))
    kept = np.abs(copies.released(plan, touched=numbers, runs=records, seed=seed).present) > 0.5
    # a record of which nothing is left did not take part, but for a chance of (1 - rate)^numbers
    apart = _coins(kept[kept.any(1)].astype(float), rate)
    model = nn.Linear(numbers, 1, bias=False)
    step = PrivateStep(
        model,
        lambda outputs, targets: outputs[:, 0],
        torch.optim.SGD(model.parameters(), lr=0.0),
        plan,
        records=records,
        generator=torch.Generator().manual_seed(seed + 1),
        physical_batch=records,
    )
    batch = next(step.batches((torch.ones(records, numbers), torch.zeros(records))))
    step(batch)
    assert model.weight.grad is not None
    counts = (model.weight.grad[0].double() * sampling.expected(records)).round().numpy()
    together = _spread(counts, len(batch), rate)
    return Check(name="masks of coordinates", p_value=min(1.0, 2 * min(apart, together)))


def influence(step: PrivateStep, batch: Batch) -> Check:
    """Whether leaving out a record takes its own clipped gradient from the noisy sum, and that alone.

    The noise is the same with and without: the generator is put back. For noise that is added, draws
    that are of whole records, and models without dropout.
    """
    plain = step.plan.sampling.thinning == 1 and not isinstance(step.plan.clipping, Importance)
    if not isinstance(step.generator, torch.Generator) or not plain or not len(batch):
        raise Unsupported(
            "this check repeats a step with the same noise: it needs a generator that can be put back, "
            "no masks or coins, which differ with the records, and a record to leave out. Pass a step "
            "with generator= and plain draws."
        )
    state = step.generator.get_state()

    def noisy(indices: Tensor) -> Tensor:
        step.generator.set_state(state)  # type: ignore[union-attr]
        mean = step._noisy_mean(Batch(indices, batch.data, batch.physical)).double().cpu()
        return mean * step.plan.sampling.expected(step.records)

    whole = noisy(batch.indices)
    balls = step.plan.clipping.balls(step._size())
    sizes = [ball.dimension or len(whole) for ball in balls]
    within = True
    for place in range(len(batch)):
        moved = whole - noisy(torch.cat([batch.indices[:place], batch.indices[place + 1 :]]))
        alone = clipped_sum(step, Batch(batch.indices[place : place + 1], batch.data, 1))
        for part, own, ball in zip(moved.split(sizes), alone.split(sizes), balls, strict=True):
            length = float(torch.linalg.vector_norm(part, ball.p))
            # single precision: sums of some hundred numbers are right to 1e-4 of the norm
            within &= length <= ball.norm * (1 + _ROUNDED)
            within &= float(part.abs().max()) <= ball.top * (1 + _ROUNDED)
            within &= float((part - own).abs().max()) <= ball.top * _ROUNDED
    return Check(name="influence of a record", p_value=float(within))


def _law(step: PrivateStep) -> tuple[float, Array]:
    """The exponent of the noise, and its scale at each number."""
    balls = step.plan.clipping.balls(step._size())
    exponents, scales = set(), []
    for ball, (noise, norm) in zip(
        balls, step.plan.noise.over(balls, step.plan.clipping.unit), strict=True
    ):
        match noise:
            case Gaussian(multiplier=deviation):
                law = (2.0, deviation * math.sqrt(2))
            case Laplace(multiplier=scale):
                law = (1.0, scale)
            case GeneralizedGaussian(beta=beta, multiplier=scale):
                law = (beta, scale)
            case _:
                raise Unsupported(
                    f"{type(noise).__name__} is not added to the sum, so there is no noise to look at "
                    "apart from it. Check the plan with hush.audit.mechanism.audit."
                )
        exponents.add(law[0])
        scales.append(np.full(ball.dimension or step._size(), law[1] * norm))
    if step.plan.sampling.thinning < 1 or step._frames is not None:
        raise Unsupported(
            "with masks or public bases the sum before noise is not known from outside. Check the plan "
            "with hush.audit.mechanism.audit, and its masks with masks_independent."
        )
    return exponents.pop(), np.concatenate(scales)


def _repeats(noise: Array) -> float:
    """The p-value of rows that say nothing of each other: how often rows so far apart agree in sign.

    For any symmetric law the products of signs at one distance are independent coins, exactly.
    """
    signs, rows = np.sign(noise), len(noise)
    apart = {*range(1, min(rows, _APART + 1)), rows // 2} - {0}
    found = [
        float(stats.binomtest(int((signs[k:] == signs[:-k]).sum()), signs[k:].size, 0.5).pvalue)
        for k in apart
    ]
    return min(1.0, len(found) * min(found, default=1.0))


def _coins(table: Array, rate: float) -> float:
    """The p-value of independent coins: their number, and its spread over rows and over columns.

    The first is exact. The spreads are chi-square to a relative 1 / (size x rate) of their variance.
    """
    thrown, heads = table.size, int(table.sum())
    if rate == 1:
        return float(heads == thrown)
    found = [float(stats.binomtest(heads, thrown, rate).pvalue)]
    for axis in (0, 1):
        found.append(_spread(table.sum(axis), table.shape[axis], rate))
    return min(1.0, len(found) * min(found))


def _spread(counts: Array, thrown: int, rate: float) -> float:
    """The p-value of how far counts are from each other, each of so many coins."""
    spread = float(((counts - thrown * rate) ** 2).sum() / (thrown * rate * (1 - rate)))
    law = stats.chi2(len(counts))
    return _two_sided(law.cdf(spread), law.sf(spread))


def _two_sided(below: float, above: float) -> float:
    return min(1.0, 2 * min(below, above))
