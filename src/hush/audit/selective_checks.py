"""Checks of selective steps: a rejection leaves nothing behind, and both models see the same records."""

import torch
from torch import Tensor

from hush.audit.checks import Check
from hush.core.errors import Unsupported
from hush.gradients.structure import tensors
from hush.training.records import Data
from hush.training.selective import Trials
from hush.training.step import PrivateStep


def rollback_complete(step: PrivateStep, data: Data, steps: int) -> Check:
    """Whether a rejected proposal leaves weights, buffers and optimizer as they were, bit for bit."""
    _trials(step)
    rejected, same = 0, True
    for batch in step.batches(data, steps=steps):
        before = [value.clone() for value in _state(step)]
        if step(batch):
            continue
        rejected += 1
        after = _state(step)
        same &= len(before) == len(after) and all(map(torch.equal, before, after))
    if not rejected:
        raise Unsupported(
            f"all of {steps} proposals were accepted: nothing shows what a rejection leaves behind. "
            "Lower the threshold, or run more steps."
        )
    return Check(name="what a rejection leaves", p_value=float(same))


def no_change_measured(step: PrivateStep, data: Data, steps: int) -> Check:
    """Whether a proposal that moves nothing is measured as no change, whatever records are drawn.

    Learning rates are set to 0 for it. A loss kept from another batch, or another model's dropout,
    shows as a change.
    """
    trials = _trials(step)
    seen: list[float] = []
    passes = trials._passes

    def watched(number: Tensor) -> bool:
        seen.append(float(number))
        return passes(number)

    rates = [group["lr"] for group in step.optimizer.param_groups]
    trials._passes = watched  # type: ignore[method-assign]
    try:
        for group in step.optimizer.param_groups:
            group["lr"] = 0.0
        for batch in step.batches(data, steps=steps):
            step(batch)
    finally:
        del trials._passes
        for group, rate in zip(step.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
    return Check(name="the test of no change", p_value=float(not any(seen)))


def _trials(step: PrivateStep) -> Trials:
    if step._trials is None:
        raise Unsupported("this check is of selective steps: pass one whose plan has release=Selective.")
    return step._trials


def _state(step: PrivateStep) -> list[Tensor]:
    """All that a step can move."""
    return [
        *step.model.parameters(),
        *step.model.buffers(),
        *(value.grad for value in step.model.parameters() if value.grad is not None),
        *tensors(list(step.optimizer.state.values())),
    ]
