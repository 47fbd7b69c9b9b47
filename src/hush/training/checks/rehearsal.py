"""Private steps that leave no trace: for tests of a step just before it runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from hush.accounting.ledger.ledger import Ledger
from hush.core.randomness import SystemSource
from hush.training.resume import Snapshot

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


@contextmanager
def rehearsal(step: "PrivateStep") -> Iterator[None]:
    """Let the step run, charged to a ledger in memory, and put everything back at the end.

    Weights, buffers, gradients, optimizer state, randomness, counters and the batch that was drawn are
    those before, bit for bit; attributes of modules are the same objects.
    Noise that was drawn inside is drawn again afterwards: **nothing that a step gives inside may be
    released**, nor anything that depends on it beyond whether it ran at all.
    """
    before = Snapshot(step.model, step.optimizer)
    attributes = [(vars(module), dict(vars(module))) for module in step.model.modules()]
    attributes += [(module._buffers, dict(module._buffers)) for module in step.model.modules()]
    source, ledger, loss = step.generator, step.ledger, step.loss
    state = None if isinstance(source, SystemSource) else source.get_state()
    counted = step.run, step.steps, step.skipped, step.accepted_trials
    bounded, pending = step.rounding_bounded, step.pending_batch
    charged = step.charged_run, step.randomness
    update = None if step.update is None else step.update.clone()  # its memory is used again
    schedule = step.basis_schedule
    basis = None if schedule is None else schedule.state_dict()
    step.ledger, step.pending_batch = Ledger(None), None
    try:
        with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
            yield
    finally:
        for own, values in attributes:
            own.clear()
            own.update(values)
        before.restore()
        step.generator, step.ledger, step.loss, step.update = source, ledger, loss, update
        if not isinstance(source, SystemSource) and state is not None:
            source.set_state(state)
        step.run, step.steps, step.skipped, step.accepted_trials = counted
        step.rounding_bounded, step.pending_batch = bounded, pending
        step.charged_run, step.randomness = charged
        if schedule is not None and basis is not None and schedule.state_dict() is not basis:
            schedule.load_state_dict(basis)
        step.adopt_weights()
