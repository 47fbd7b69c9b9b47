"""Checks of masks, rollback and the measured change: properties of parts that no user overrides."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from hush.clipping import Linf
from hush.core.errors import Unsupported
from hush.core.parts import Sampling
from hush.core.plan import Plan
from hush.gradients.tree import tree_leaves
from hush.noise import Gaussian
from hush.training.data import Data
from hush.training.options import Execution, Randomness
from hush.training.step import PrivateStep
from hush_recipes.audit import copies
from hush_recipes.audit.draws import Check, bonferroni, coins, sizes, trials_of


def masks_independent(
    sampling: Sampling, *, records: int = 250, numbers: int = 40, seed: int = 0
) -> Check:
    """Check that each coordinate of each record is sampled at the rate charged, independently.

    With little noise a private step shows its masks: one by one for records with coordinates of their
    own, and how many records take part for coordinates that all of them share.
    """
    rate = sampling.coordinate_participation
    if rate == 1:
        raise Unsupported(
            f"{type(sampling).__name__} samples no coordinates, so there are no masks. Pass "
            "Coordinate or Twice."
        )
    plan = Plan(sampling=sampling, clipping=Linf(norm=1.0), noise=Gaussian(multiplier=1e-3))
    included = np.abs(copies.released(plan, touched=numbers, runs=records, seed=seed).present) > 0.5
    # a record without a coordinate was not drawn, except with probability (1 - rate)^numbers
    separate = coins(included[included.any(1)], rate)
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
    shared = sizes(counts, len(batch), rate)
    return Check(name="masks of coordinates", p_value=bonferroni(np.array([separate, shared])))


def rollback_complete(step: PrivateStep, data: Data, steps: int) -> Check:
    """Check that a rejected proposal restores weights, buffers and optimizer, bit for bit."""
    trials_of(step)
    rejected, unchanged = 0, True
    for batch in step.batches(data, steps=steps):
        before = [value.clone() for value in _state(step)]
        if step(batch):
            continue
        rejected += 1
        after = _state(step)
        unchanged &= len(before) == len(after) and all(map(torch.equal, before, after))
    if not rejected:
        raise Unsupported(
            f"All {steps} proposals were accepted. Lower the threshold, or run more steps."
        )
    return Check(name="what a rejection leaves", p_value=float(unchanged))


def no_change_measured(step: PrivateStep, data: Data, steps: int) -> Check:
    """Check that a proposal with a learning rate of 0 is measured as no change.

    A loss of another batch, or dropout of another model, shows as a change.
    """
    trials = trials_of(step)
    rises: list[float] = []
    noisy_verdict = trials.noisy_verdict

    def watched(rise: Tensor) -> bool:
        rises.append(float(rise))
        return noisy_verdict(rise)

    trials.noisy_verdict = watched  # type: ignore[method-assign]
    try:
        with _no_moves(step):
            for batch in step.batches(data, steps=steps):
                step(batch)
    finally:
        del trials.noisy_verdict
    return Check(name="the test of no change", p_value=float(not any(rises)))


@contextmanager
def _no_moves(step: PrivateStep) -> Iterator[None]:
    """Learning rates of 0."""
    rates = [group["lr"] for group in step.optimizer.param_groups]
    try:
        for group in step.optimizer.param_groups:
            group["lr"] = 0.0
        yield
    finally:
        for group, rate in zip(step.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _state(step: PrivateStep) -> list[Tensor]:
    """Every tensor that a step can change."""
    return [
        *step.model.parameters(),
        *step.model.buffers(),
        *(value.grad for value in step.model.parameters() if value.grad is not None),
        *tree_leaves(list(step.optimizer.state.values())),
    ]
