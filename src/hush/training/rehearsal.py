"""Snapshots of a model and its optimizer, and private steps that leave no trace.

For trials that may be rejected, and for tests of a step just before it runs.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hush.core.randomness import SystemSource

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


class Snapshot:
    """The weights, buffers, gradients and optimizer state of one moment."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = [(value, _copied(value), _copied(value.grad)) for value in model.parameters()]
        # by their place: a forward pass may have put another tensor there
        self._buffers = [
            (module, name, value, _copied(value))
            for module in model.modules()
            for name, value in module._buffers.items()
        ]
        self._state = {key: _copied(state) for key, state in optimizer.state.items()}
        self._groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back; the snapshot stays as it is and may be used again."""
        for parameter, value, gradient in self._parameters:
            parameter.copy_(value)
            parameter.grad = _copied(gradient)
        for module, name, buffer, value in self._buffers:
            module._buffers[name] = buffer
            if buffer is not None:
                buffer.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update({key: _copied(state) for key, state in self._state.items()})
        for group, settings in zip(self.optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({**_copied(settings), "params": parameters})


def _copied(value: Any) -> Any:
    """A copy that shares nothing; tensors without their history."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return copy.deepcopy(value)


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
    gradients, source, ledger = step.gradients, step.generator, step.ledger
    loss, probed = gradients.loss, gradients.probed
    state = None if isinstance(source, SystemSource) else source.get_state()
    counted = step.run, step.steps, step.skipped, step.accepted
    bounded, pending = step.rounding_bounded, step.pending_batch
    charged = step.charged_run, step.secrecy
    update = None if step.update is None else step.update.clone()  # its memory is used again
    schedule = step.basis_schedule
    basis = None if schedule is None else schedule.state_dict()
    step.ledger = step.reducer.open_ledger(None, step.plan, step.adjacency)
    step.pending_batch = None
    try:
        with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
            yield
    finally:
        for own, values in attributes:
            own.clear()
            own.update(values)
        before.restore()
        step.generator, step.ledger, step.update = source, ledger, update
        gradients.loss, gradients.probed = loss, probed
        if not isinstance(source, SystemSource) and state is not None:
            source.set_state(state)
        step.run, step.steps, step.skipped, step.accepted = counted
        step.rounding_bounded, step.pending_batch = bounded, pending
        step.charged_run, step.secrecy = charged
        if schedule is not None and basis is not None and schedule.state_dict() is not basis:
            schedule.load_state_dict(basis)
        step.adopt_weights()
