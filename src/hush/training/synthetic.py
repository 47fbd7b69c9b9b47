"""Synthetic records, checks of private records, and the physical batch size."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from hush.core.errors import DataError
from hush.gradients.tape import GradientTape
from hush.gradients.tree import Loss, call_model, local_shard, tree_leaves, tree_map
from hush.training.data import Data, pair_of

_ROWS = 4096
_HOST_MEMORY = 2**27
"""Memory of a physical batch on a CPU in bytes; docs/results/step.md has measurements."""


def synthetic_records(inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Synthetic inputs and targets with the shapes and types of a few records.

    Inputs are normally distributed, and targets are uniform on [0, 1). Integers are 0 and 1, which most
    vocabularies and classes contain. Consecutive rows differ.
    """
    generator = torch.Generator().manual_seed(0)

    def synthetic(value: Tensor, draw: Callable[..., Tensor]) -> Tensor:
        if value.is_floating_point() or value.is_complex():
            return draw(value.shape, generator=generator).to(value.device, value.dtype)
        row = torch.randint(0, 2, value.shape[1:], generator=generator)
        turn = torch.arange(len(value)).reshape(-1, *[1] * row.dim())
        return ((row + turn) % 2).to(value.device, value.dtype)

    made = tree_map(inputs, partial(synthetic, draw=torch.randn))
    return made, tree_map(targets, partial(synthetic, draw=torch.rand))


def check_labels(model: nn.Module, loss: Any, inputs: Any, data: Data) -> None:
    """Raise if a label in memory is not a class, because the error of torch would show the label."""
    pair = pair_of(data)
    if pair is None or not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return
    outputs = call_model(model, inputs)
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return
    classes = outputs.shape[1]
    for part in tree_leaves(pair[1]):
        if part.is_floating_point():
            continue
        if bool((((part < 0) | (part >= classes)) & (part != loss.ignore_index)).any()):
            raise DataError(
                f"some labels are not classes of the model, 0 to {classes - 1} (they are private and "
                "not shown). Number the labels from 0, or use a model with more outputs."
            )


@torch.no_grad()
def check_some_number(data: Data) -> None:
    """Raise if an entry of the inputs or targets in memory is not finite in all records."""
    for part in tree_leaves(pair_of(data) or ()):
        if not part.is_floating_point():
            continue
        missing = ~part[:1].isfinite()[0]
        for rows in part.split(_ROWS):
            if not bool(missing.any()):
                break
            missing = missing & ~rows.isfinite().any(0)
        if bool(missing.any()):
            raise DataError(
                f"{int(missing.sum())} of the {missing.numel()} entries of a record of shape "
                f"{tuple(missing.shape)} are NaN or infinite in every record. Leave them out, or fill "
                "them with public values; use booleans for masks."
            )


def records_that_fit(
    model: nn.Module, loss: Loss, inputs: Any, targets: Any, tape: GradientTape, *, one_by_one: bool
) -> int:
    """Physical batch size, from the memory that a few records need between forward and backward pass."""
    device, limit = next(model.parameters()).device, _HOST_MEMORY
    if device.type == "cuda":  # use a quarter of the free memory
        free, total = torch.cuda.mem_get_info(device)
        share = total * torch.cuda.get_per_process_memory_fraction(device)
        limit = max(0, int(min(free, share - torch.cuda.memory_reserved(device)))) // 4
    weights = {local_shard(value).untyped_storage().data_ptr() for value in model.parameters()}
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        if value.layout == torch.strided and value.untyped_storage().data_ptr() not in weights:
            kept[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    if not one_by_one:
        with _SavedTensors(note):
            loss(call_model(model, inputs), targets)
    used = sum(kept.values()) + sum(value.untyped_storage().nbytes() for value in tape.tensors())
    return max(1, limit * tape.records // max(1, used))


class _SavedTensors(TorchFunctionMode):
    """Torch function mode that records the tensors saved by autograd, even in checkpointed segments."""

    def __init__(self, note: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with saved_tensors_hooks(self._note, lambda value: value):
            return func(*args, **(kwargs or {}))
