"""Number of records that fit into memory at once."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from hush.gradients.tape import GradientTape
from hush.gradients.tree import Loss, call_model, local_shard

_HOST_MEMORY = 2**27
"""Bytes of a physical batch on the CPU: larger ones are slower, as they leave the caches.

Measured in docs/results/step.md.
"""


def records_that_fit(model: nn.Module, loss: Loss, inputs: Any, targets: Any, tape: GradientTape) -> int:
    """Physical batch size, from the memory that a few records keep between forward and backward pass."""
    limit = memory_limit(next(model.parameters()).device)
    factors = sum(value.untyped_storage().nbytes() for value in tape.tensors())
    used = activations(model, loss, inputs, targets) + factors
    return max(1, limit * tape.records // max(1, used))


def memory_limit(device: torch.device) -> int:
    """Bytes of a physical batch: on a GPU a quarter of what this process may still allocate."""
    if device.type != "cuda":
        return _HOST_MEMORY
    free, total = torch.cuda.mem_get_info(device)
    share = total * torch.cuda.get_per_process_memory_fraction(device)
    return max(0, int(min(free, share - torch.cuda.memory_reserved(device)))) // 4


def activations(model: nn.Module, loss: Loss, inputs: Any, targets: Any) -> int:
    """Bytes that a plain forward pass keeps for its backward pass, without gradient checkpointing."""
    weights = {local_shard(value).untyped_storage().data_ptr() for value in model.parameters()}
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        if value.layout != torch.strided:
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with _SavedTensors(note):
        values = loss(call_model(model, inputs), targets)
    del values
    return sum(kept.values())


class _SavedTensors(TorchFunctionMode):
    """Torch function mode that notes the tensors that autograd saves, also in checkpointed segments."""

    def __init__(self, note: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with saved_tensors_hooks(self._note, lambda value: value):
            return func(*args, **(kwargs or {}))
