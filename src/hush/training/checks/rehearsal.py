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
    held = [(vars(module), dict(vars(module))) for module in step.model.modules()]
    held += [(module._buffers, dict(module._buffers)) for module in step.model.modules()]
    source, ledger, loss = step.generator, step.ledger, step.loss
    state = None if isinstance(source, SystemSource) else source.get_state()
    counted = step.run, step.steps, step.skipped, step.accepted, step._bounded, step._drawn
    charged = step.charged_run, step.randomness
    update = None if step.update is None else step.update.clone()  # its memory is used again
    frame = None if step._frames is None else step._frames.state_dict()
    step.ledger, step._drawn = Ledger(None), None
    try:
        with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
            yield
    finally:
        for attributes, kept in held:
            attributes.clear()
            attributes.update(kept)
        before.restore()
        step.generator, step.ledger, step.loss, step.update = source, ledger, loss, update
        if not isinstance(source, SystemSource) and state is not None:
            source.set_state(state)
        step.run, step.steps, step.skipped, accepted, step._bounded, step._drawn = counted
        step.charged_run, step.randomness = charged
        if step.trials is not None:
            step.trials.accepted = accepted
        if step._frames is not None and frame is not None and step._frames.state_dict() is not frame:
            step._frames.load_state_dict(frame)
        step.adopt_weights()
