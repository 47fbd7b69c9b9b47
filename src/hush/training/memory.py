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


def records_that_fit(
    model: nn.Module, loss: Loss, inputs: Any, targets: Any, tape: GradientTape, *, one_by_one: bool
) -> int:
    """Physical batch size, from the memory that a few records keep between forward and backward pass.

    Args:
        model: Trained model.
        loss: One value per record.
        inputs: Inputs of the records.
        targets: Their targets.
        tape: Tape of the records, whose factors are also kept.
        one_by_one: Whether the activations of a single record are kept at a time.
    """
    device = next(model.parameters()).device
    limit = _HOST_MEMORY
    if device.type == "cuda":  # a quarter of what this process may still allocate
        free, total = torch.cuda.mem_get_info(device)
        share = total * torch.cuda.get_per_process_memory_fraction(device)
        limit = max(0, int(min(free, share - torch.cuda.memory_reserved(device)))) // 4
    weights = {local_shard(value).untyped_storage().data_ptr() for value in model.parameters()}
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        if value.layout == torch.strided:
            storage = value.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
        return value

    if not one_by_one:
        with _SavedTensors(note):
            values = loss(call_model(model, inputs), targets)
        del values
    used = sum(kept.values()) + sum(value.untyped_storage().nbytes() for value in tape.tensors())
    return max(1, limit * tape.records // max(1, used))


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
