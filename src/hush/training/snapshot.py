"""All that a step can move, kept aside so that it can be put back bit for bit."""

import copy
from typing import Any

import torch
from torch import Tensor, nn


class Snapshot:
    """The weights, buffers, gradients and optimizer state of one moment."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(value, _copied(value), _copied(value.grad)) for value in model.parameters()]
        # by their place: a forward pass may have put another tensor there
        self._buffers = [
            (module, name, value, _copied(value))
            for module in model.modules()
            for name, value in module._buffers.items()
        ]
        self._state = {key: _copied(held) for key, held in optimizer.state.items()}
        self._groups = [_settings(group) for group in optimizer.param_groups]

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
        self._optimizer.state.clear()
        self._optimizer.state.update({key: _copied(held) for key, held in self._state.items()})
        for group, kept in zip(self._optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update({**_copied(kept), "params": parameters})


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, such as its learning rate."""
    return {key: _copied(value) for key, value in group.items() if key != "params"}


def _copied(value: Any) -> Any:
    """A copy that shares nothing; tensors without their history."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return copy.deepcopy(value)
