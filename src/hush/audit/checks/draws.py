"""Checks that records and coordinates take part as charged: at their rate, and independently."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from hush.audit.checks import p_values
from hush.audit.checks.noise import Check
from hush.audit.checks.units import Numbers, number_of_units, units_drawn, worked_on
from hush.audit.mechanisms import copies
from hush.clipping import Linf
from hush.core.errors import Unsupported
from hush.core.parts import Sampling
from hush.core.plan import Plan
from hush.core.value import check_count, check_kind
from hush.noise import Gaussian
from hush.training.checks.rehearsal import rehearsal
from hush.training.data import Batch, Data
from hush.training.options import Execution, Randomness
from hush.training.step import PrivateStep

_DRAWS = 400


def draws_independent(step: PrivateStep, data: Data, draws: int = _DRAWS) -> Check:
    """Whether each unit of privacy is drawn at the rate charged, independently across units and steps.

    A unit is a record, or an owner of several: then a batch must also hold few enough records of each
    owner, its own, one after another. Of several ranks, what all of them work on together counts.
    Nothing is trained: batches are drawn and thrown away.

    Args:
        step: as it is.
        data: as many records as the step is for.
        draws: number of batches.
    """
    check_count("draws", draws, "they are counted", at_least=2)
    nobody = Batch(torch.arange(0), data, 1)
    with rehearsal(step):
        drawn = [units_drawn(step, worked_on(step, step.draw(nobody))) for _ in range(draws)]
    rate = step.plan.sampling.participation
    p_value = drawn_as_charged(drawn, number_of_units(step, data), rate)
    return Check(name="draws of units", p_value=p_value)


def drawn_as_charged(drawn: Sequence[Numbers | None], units: int, rate: float) -> float:
    """P-value of draws that are independent coins of each unit, nobody twice; 0 where one is None."""
    taken = np.zeros((len(drawn), units), dtype=np.int64)
    for row, numbers in zip(taken, drawn, strict=True):
        if numbers is None:
            return 0.0
        np.add.at(row, numbers, 1)
    return p_values.coins(taken > 0, rate) if taken.max(initial=0) <= 1 else 0.0


def masks_independent(
    sampling: Sampling, *, records: int = 250, numbers: int = 40, seed: int = 0
) -> Check:
    """Whether each coordinate of each record takes part at the rate charged, independently.

    A private step shows its masks where there is next to no noise: of records that move coordinates of
    their own, one by one; of records that all move the same ones, how many take part in each.

    Args:
        sampling: one that samples coordinates.
        records: of either step.
        numbers: coordinates of each record.
        seed: of the steps.
    """
    check_kind("sampling", sampling, Sampling)  # type: ignore[type-abstract]
    rate = sampling.coordinate_participation
    if rate == 1:
        raise Unsupported(
            f"{type(sampling).__name__} samples no coordinates, so there are no masks to look at. Pass "
            "Coordinate or Twice."
        )
    plan = Plan(sampling=sampling, clipping=Linf(norm=1.0), noise=Gaussian(multiplier=1e-3))
    included = np.abs(copies.released(plan, touched=numbers, runs=records, seed=seed).present) > 0.5
    # a record of which nothing is left did not take part, but for a chance of (1 - rate)^numbers
    separate = p_values.coins(included[included.any(1)], rate)
    model = nn.Linear(numbers, 1, bias=False)
    step = PrivateStep(
        model,
        lambda outputs, targets: outputs[:, 0],
        torch.optim.SGD(model.parameters(), lr=0.0),
        plan,
        records=records,
        randomness=Randomness(generator=torch.Generator().manual_seed(seed + 1)),
        execution=Execution(physical_batch=records),
    )
    batch = next(step.batches((torch.ones(records, numbers), torch.zeros(records))))
    step(batch)
    assert step.update is not None
    counts = (step.update * sampling.expected(records)).round().numpy()
    shared = p_values.sizes(counts, len(batch), rate)
    return Check(name="masks of coordinates", p_value=p_values.bonferroni(np.array([separate, shared])))
