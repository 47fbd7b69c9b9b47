"""Probe before the first draw: whether a model can be trained privately, and how many records fit.

Made-up records take the place of private ones, so that the answers are functions of the model, the loss
and public shapes: docs/guarantees/tape.md, 10.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hush.core.errors import Unsupported
from hush.gradients.checks.isolation import check_independent_losses
from hush.gradients.checks.models import PerSampleLoss
from hush.gradients.recording import record
from hush.gradients.tape import BranchedTape, GradientTape
from hush.gradients.tree import check_arguments, expand_views, tree_map
from hush.training.checks.labels import check_labels
from hush.training.data import Data, check_some_number, take
from hush.training.physical_batch import records_that_fit

if TYPE_CHECKING:
    from hush.training.step import PrivateStep

_BRANCHING = 64
"""Physical batch of models that branch on a value: two records do not tell what others take."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What made-up records show of a model."""

    physical_batch: int
    """Records to work on at once."""
    rounding_bounded: bool
    """Whether the rounding of a clipped sum is within what is paid for."""


def probe_batch(step: "PrivateStep", data: Data) -> Probe:
    """Probe of the step's model and loss; raises if they cannot be trained privately on the data.

    Where the model does not take made-up records, two of the data's decide.
    """
    check_some_number(data)
    records = tree_map(take(data, torch.arange(min(2, step.records))), step.to_device)
    check_arguments(step.model, records[0])
    with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
        inputs, targets = stand_ins(*records)
        try:
            tape = _checked_tape(step, inputs, targets)
            # what is not finite cannot be compared, and a branch may have been left out
            usable = bool(tape.norms(2.0).isfinite().all()) and not tape.unused_parameters
        except Unsupported:
            raise
        except Exception:  # whatever the model raises for an input that it does not take
            usable = False
        if not usable:
            inputs, targets = records
            tape = _checked_tape(step, inputs, targets)
        if tape.unused_parameters:
            raise Unsupported(
                f"the loss does not depend on {', '.join(tape.unused_parameters)}: noise alone would "
                "move it. Freeze it with requires_grad_(False), or use it in forward()."
            )
        criterion = step.loss.loss if isinstance(step.loss, PerSampleLoss) else step.loss
        check_labels(step.model, criterion, inputs, data)
        physical = step.physical_batch or _physical_batch(step, inputs, targets, tape)
    batches = -(-step.records // physical)
    running = batches * step.records * 2.0**-52 <= step.rounding / 8
    bounded = running and tape.rounding_bounded(min(physical, step.records))
    return Probe(physical_batch=physical, rounding_bounded=bounded)


def _checked_tape(step: "PrivateStep", inputs: Any, targets: Any) -> GradientTape | BranchedTape:
    """Tape of one or two records, after checks that the model keeps them apart."""
    tape: GradientTape | BranchedTape = step.module_state.probe(
        partial(record, step.model, step.loss, views=step.views), inputs, targets
    )
    if step.trials is not None:
        step.trials.probe(inputs, targets)
    if tape.records == 2:
        check_independent_losses(step.model, step.loss, inputs, targets)
    return tape


def _physical_batch(
    step: "PrivateStep", inputs: Any, targets: Any, tape: GradientTape | BranchedTape
) -> int:
    """Records that fit into memory at once, if that does not depend on the records."""
    if tape.reads_values:
        return _BRANCHING
    if step.views is not None:
        inputs, targets = expand_views(step.views, inputs, targets)
    return records_that_fit(step.model, step.loss, inputs, targets, tape)


def stand_ins(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Made-up inputs and targets: the same whatever the records hold, of their shapes and types.

    Inputs are normal, as those that networks are made for, and targets uniform on [0, 1), as
    probabilities are; integers are zeros and ones, which most vocabularies and classes have. No two rows
    that follow each other are alike.

    Args:
        inputs: of a few records; only shapes, types and devices count.
        targets: likewise.
    """
    generator = torch.Generator().manual_seed(0)

    def made_up(value: Tensor, draw: Callable[..., Tensor]) -> Tensor:
        if value.is_floating_point() or value.is_complex():
            return draw(value.shape, generator=generator).to(value.device, value.dtype)
        row = torch.randint(0, 2, value.shape[1:], generator=generator)
        turn = torch.arange(len(value)).reshape(-1, *[1] * row.dim())
        return ((row + turn) % 2).to(value.device, value.dtype)

    return (
        tree_map(inputs, partial(made_up, draw=torch.randn)),
        tree_map(targets, partial(made_up, draw=torch.rand)),
    )
