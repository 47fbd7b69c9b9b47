"""Checks of selective release: complete rollback, fresh test batches, noisy verdicts."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from hush.audit.checks import p_values
from hush.audit.checks.draws import drawn_as_charged
from hush.audit.checks.noise import Check
from hush.audit.checks.units import number_of_units, units_drawn
from hush.core.errors import Unsupported
from hush.core.value import check_count
from hush.gradients.tree import tree_leaves
from hush.training.checks.rehearsal import rehearsal
from hush.training.data import Batch, Data
from hush.training.methods.selective import Trials
from hush.training.step import PrivateStep

_DRAWS = 400


def rollback_complete(step: PrivateStep, data: Data, steps: int) -> Check:
    """Whether a rejected proposal leaves weights, buffers and optimizer as they were, bit for bit.

    Args:
        step: of a selective plan; its model moves.
        data: as many records as the step is for.
        steps: to run, enough for a rejection.
    """
    _trials(step)
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
            f"all of {steps} proposals were accepted: nothing shows what a rejection leaves behind. "
            "Lower the threshold, or run more steps."
        )
    return Check(name="what a rejection leaves", p_value=float(unchanged))


def no_change_measured(step: PrivateStep, data: Data, steps: int) -> Check:
    """Whether a proposal that moves nothing is measured as no change, whatever records are drawn.

    Learning rates are set to 0 for it. A loss kept from another batch, or another model's dropout,
    shows as a change.

    Args:
        step: of a selective plan.
        data: as many records as the step is for.
        steps: to run.
    """
    trials = _trials(step)
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


def fresh_test_batches(step: PrivateStep, data: Data, draws: int = _DRAWS) -> Check:
    """Whether a test's units are drawn at its rate, and independently of the training batch.

    How many units (records, or owners of several) are in both is binomial with the product of the
    rates, exactly. Only draws are made: nothing is trained, tested or charged.

    Args:
        step: of a selective plan.
        data: as many records as the step is for.
        draws: number of pairs of batches.
    """
    trials = _trials(step)
    check_count("draws", draws, "they are counted", at_least=2)
    nobody, overlap, tested = Batch(torch.arange(0), data, 1), 0, []
    with rehearsal(step):
        for _ in range(draws):
            batch = step.draw(nobody)
            test_batch = trials.draw_test(batch)
            trained, numbers = units_drawn(step, batch), units_drawn(step, test_batch)
            tested.append(numbers)
            if trained is not None and numbers is not None:
                overlap += int(np.isin(trained, numbers).sum())
    rate, units = trials.release.rate, number_of_units(step, data)
    joint_rate = step.plan.sampling.participation * rate
    joint = float(stats.binomtest(overlap, draws * units, joint_rate).pvalue)
    alone = drawn_as_charged(tested, units, rate)
    return Check(name="draws of the test", p_value=p_values.bonferroni(np.array([joint, alone])))


def noisy_verdicts(step: PrivateStep, tries: int = _DRAWS) -> Check:
    """Whether a verdict has as much noise as is charged.

    A rise of the loss one deviation of the noise beyond the threshold, on either side, is accepted with
    a chance of Phi(-1) or Phi(1): the number of verdicts is binomial, exactly.

    Args:
        step: of a selective plan.
        tries: verdicts on either side.
    """
    trials = _trials(step)
    release = trials.release
    check_count("tries", tries, "they are counted", at_least=1)
    deviation = release.multiplier * release.clip * (2 if release.test == "mean" else 1)
    by_side = []
    with rehearsal(step):
        for side in (-1.0, 1.0):
            rise = torch.tensor(
                release.threshold * release.clip + side * deviation, dtype=torch.float64
            ).to(step.device)
            accepted = sum(trials.noisy_verdict(rise.clone()) for _ in range(tries))
            by_side.append(stats.binomtest(accepted, tries, float(stats.norm.cdf(-side))).pvalue)
    return Check(name="noise of the verdict", p_value=p_values.bonferroni(np.array(by_side)))


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


def _trials(step: PrivateStep) -> Trials:
    if step.trials is None:
        raise Unsupported("this check is of selective steps: pass one whose plan has release=Selective.")
    return step.trials


def _state(step: PrivateStep) -> list[Tensor]:
    """Every tensor that a step can change."""
    return [
        *step.model.parameters(),
        *step.model.buffers(),
        *(value.grad for value in step.model.parameters() if value.grad is not None),
        *tree_leaves(list(step.optimizer.state.values())),
    ]
