"""Snapshots of a model and its optimizer, and a context that undoes private steps."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from hush.training.step import PrivateStep


class Snapshot:
    """Copy of the weights, buffers, gradients and optimizer state."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._parameters = [(value, _copied(value), _copied(value.grad)) for value in model.parameters()]
        # by name, because a forward pass may replace the tensor
        self._buffers = [
            (module, name, value, _copied(value))
            for module in model.modules()
            for name, value in module._buffers.items()
        ]
        self._state = _copied(dict(optimizer.state))
        self._groups = [
            {key: _copied(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore the model and the optimizer; may be called several times."""
        for parameter, value, gradient in self._parameters:
            parameter.copy_(value)
            parameter.grad = _copied(gradient)
        for module, name, buffer, value in self._buffers:
            module._buffers[name] = buffer
            if buffer is not None:
                buffer.copy_(value)
        self.optimizer.state.clear()
        self.optimizer.state.update(_copied(self._state))
        for group, settings in zip(self.optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({**_copied(settings), "params": parameters})


def _copied(value: Any) -> Any:
    """Deep copy with detached tensors."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return copy.deepcopy(value)


@contextmanager
def rehearsal(step: "PrivateStep") -> Iterator[None]:
    """Context for private steps on a ledger in memory; restores all state bitwise.

    Attributes of modules remain the same objects. Later steps draw the same noise again, so **no result
    of a step inside the context may be released**.
    """
    before = Snapshot(step.model, step.optimizer)
    tables = [table for module in step.model.modules() for table in (vars(module), module._buffers)]
    tables += [vars(step), vars(step.gradients)]
    contents = [dict(table) for table in tables]
    source, schedule = step.generator, step.basis_schedule
    state = source.get_state()
    update = None if step.update is None else step.update.clone()  # steps reuse its memory
    basis = None if schedule is None else schedule.state_dict()
    step.ledger = step.reducer.open_ledger(None, step.plan, step.adjacency)
    step.pending_batch = None
    step.past_noise = copy.deepcopy(step.past_noise)
    try:
        with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
            yield
    finally:
        for table, content in zip(tables, contents, strict=True):
            table.clear()
            table.update(content)
        before.restore()
        step.update = update
        source.set_state(state)
        if schedule is not None and basis is not None and schedule.state_dict() is not basis:
            schedule.load_state_dict(basis)
        step.adopt_weights()
