"""Size of a physical batch: records that fit into memory at once."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from hush.gradients.recording import Loss
from hush.gradients.tape import BranchedTape, GradientTape
from hush.gradients.tree import call_model

_HOST_MEMORY = 2**27
"""Bytes that a physical batch may keep on the CPU: larger ones are slower, as they leave the caches.

Measured in docs/results/step.md.
"""


def records_that_fit(
    model: nn.Module, loss: Loss, inputs: Any, targets: Any, tape: GradientTape | BranchedTape
) -> int:
    """Records to work on at once, from the memory that these few keep between forward and backward."""
    limit = memory_limit(next(model.parameters()).device)
    kept = activations(model, loss, inputs, targets) + sum(map(_size, tape.tensors()))
    return max(1, limit * tape.records // max(1, kept))


def memory_limit(device: torch.device) -> int:
    """Bytes that a physical batch may keep: on a GPU a quarter of what this process may still take."""
    if device.type != "cuda":
        return _HOST_MEMORY
    free, total = torch.cuda.mem_get_info(device)
    share = total * torch.cuda.get_per_process_memory_fraction(device)
    return max(0, int(min(free, share - torch.cuda.memory_reserved(device)))) // 4


def activations(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> int:
    """Bytes that a plain forward pass keeps for its backward pass."""
    own = {value.untyped_storage().data_ptr() for value in model.parameters()}
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        if value.untyped_storage().data_ptr() not in own:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    with saved_tensors_hooks(note, lambda value: value):
        values = loss(call_model(model, inputs), targets)
    del values
    return sum(kept.values())


def _size(value: Tensor) -> int:
    return value.untyped_storage().nbytes()
