"""Probe before the first draw: whether a model can be trained privately, and how many records fit.

Made-up records take the place of private ones, so that the answers are functions of the model, the loss
and public shapes: docs/guarantees/tape.md, 10.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from hush.core.errors import DataError, PrivacyWarning, Unsupported
from hush.gradients.losses import criterion_of
from hush.gradients.probe import buffers_restored, probe
from hush.gradients.recording import uncompiled
from hush.gradients.tape import GradientTape, unit_tape
from hush.gradients.tree import (
    Loss,
    call_model,
    check_arguments,
    expand_views,
    local_shard,
    tree_leaves,
    tree_map,
)
from hush.training.data import Data, count, pair_of, take

if TYPE_CHECKING:
    from hush.training.step import PrivateStep

_ROWS = 4096
_HOST_MEMORY = 2**27
"""Bytes that a physical batch may keep on the CPU: larger ones are slower, as they leave the caches.

Measured in docs/results/step.md.
"""


def probe_batch(step: "PrivateStep", data: Data) -> tuple[int, bool]:
    """Physical batch size, and whether the rounding of a clipped sum is within what is paid for.

    Raises if the model and loss cannot be trained privately on the data. Where the model does not take
    made-up records, two of the data's decide. What passes change is as it was before.
    """
    return _probe_records(step, data)


def _probe_records(step: "PrivateStep", data: Data) -> tuple[int, bool]:
    if torch.is_inference_mode_enabled():
        raise Unsupported(
            "the step is inside torch.inference_mode(), where there are no gradients to clip. Train "
            "outside of it."
        )
    _check_weights(step)
    check_some_number(data)
    records = tree_map(take(data, torch.arange(min(2, count(data)))), step.to_device)
    check_arguments(step.model, records[0])
    devices = [step.device] if step.device.type == "cuda" else []
    with uncompiled(), torch.random.fork_rng(devices):
        inputs, targets = stand_ins(*records)
        try:
            tape = _checked_tape(step, inputs, targets)
            usable = bool(tape.norms(2.0).isfinite().all())  # what is not finite cannot be compared
        except Unsupported:
            raise
        except Exception:  # whatever the model raises for an input that it does not take
            usable = False
        if not usable:
            inputs, targets = records
            tape = _checked_tape(step, inputs, targets)
        if step.probed.unused:
            unused = step.probed.unused
            more = f" and {len(unused) - 3} others" if len(unused) > 3 else ""
            warnings.warn(
                f"the loss does not depend on {', '.join(unused[:3])}{more} for synthetic records: a "
                "parameter that it never reaches receives noise only. Freeze it with "
                "requires_grad_(False), or use it in forward().",
                PrivacyWarning,
                stacklevel=2,
            )
        check_labels(step.model, criterion_of(step.loss), _one_view(step, inputs, targets)[0], data)
        if step.sharded is not None and step.processes is not None:
            step.processes.exchange("the labels")  # one rank's may be wrong, and all go on together
        physical = step.physical_batch or _physical_batch(step, inputs, targets, tape)
    per_unit = 1 if step.units is None else step.units.per_unit
    slots = step.slots(data)
    # no unit is split: one alone may be more than a physical batch, and two batches may fill just one
    together = min(max(physical, per_unit), slots)
    batches = -(-slots // physical) * (2 if per_unit > 1 else 1)
    if step.processes is not None:  # an unfilled one, and a sum, of each rank
        batches += 2 * step.processes.size
    running = batches * slots * 2.0**-52 <= step.rounding / 8
    bounded = running and tape.rounding_bounded(together) and not step.probed.one_by_one
    if step.units is not None and per_unit > 1 and tape.records == 2:
        # units of more records are materialised where these are, or kept in the same form
        pair = unit_tape(tape, torch.tensor([2]), step.units.reduction, None)
        bounded = bounded and pair.rounding_bounded(together)
    return physical, bounded


@torch.no_grad()
def _check_weights(step: "PrivateStep") -> None:
    """Raise if a weight is not finite: weights are released, or public, and tell of no record."""
    for name, value in step.trainable().items():
        if not bool(local_shard(value).isfinite().all()):
            raise Unsupported(
                f"{name} has a weight that is NaN or infinite: no gradient would be finite, every "
                "record would be left out, and the budget spent on noise alone. Initialise or load it "
                "anew; after private steps, lower the learning rate."
            )


def _checked_tape(step: "PrivateStep", inputs: Any, targets: Any) -> GradientTape:
    """Tape of one or two records, after the probe of the model."""
    if len(next(tree_leaves(inputs))) == 2:
        sharded = None if step.sharded is None else step.sharded.modules
        step.probed = probe(step.model, step.loss, inputs, targets, step.views, sharded=sharded)
        step._weights.may_change = frozenset(step.probed.changing_buffers)
        if step.trials is not None:
            step.trials.probe(inputs, targets)
    with buffers_restored(step.model, step.probed.changing_buffers):
        return step.record(inputs, targets)


def _one_view(step: "PrivateStep", inputs: Any, targets: Any) -> tuple[Any, Any]:
    """Records as the model is given them: a view of each, where there are views."""
    if step.views is None:
        return inputs, targets
    records = len(next(tree_leaves(inputs)))
    expanded = expand_views(step.views, inputs, targets)
    count = len(next(tree_leaves(expanded[0]))) // records
    return tree_map(expanded[0], lambda value: value[::count]), targets


def _physical_batch(step: "PrivateStep", inputs: Any, targets: Any, tape: GradientTape) -> int:
    """Records that fit into memory at once, if that does not depend on the records."""
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


@torch.no_grad()
def check_labels(model: nn.Module, loss: Any, inputs: Any, data: Data) -> None:
    """Raise if some label is no class, where the loss takes classes and the data is in memory.

    `inputs` are a few records, to see how many classes there are. torch's own error would come in the
    middle of a run, and show a private label.
    """
    pair = pair_of(data)
    if pair is None or not isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return
    outputs = call_model(model, inputs)
    labels = [part for part in tree_leaves(pair[1]) if not part.is_floating_point()]
    if not isinstance(outputs, Tensor) or outputs.dim() < 2 or not labels:
        return
    classes = outputs.shape[1]
    for part in labels:
        wrong = (part < 0) | (part >= classes)
        if bool((wrong & (part != loss.ignore_index)).any()):
            raise DataError(
                f"some labels are not among the model's {classes} classes, 0 to {classes - 1} (which is "
                "private and not shown): their loss is not defined. Number the classes from 0, or "
                "give the model more outputs."
            )


@torch.no_grad()
def check_some_number(data: Data) -> None:
    """Raise if an entry of the inputs or targets is finite in no record, where they are in memory.

    No record would have a finite gradient: each would be left out, and the model trained on noise alone
    without a word. A single record with a number there is enough to pass, so that this tells nothing of
    one record unless all others have none; like the other checks of the data, it stops a run before
    anything is released and is not part of what is released.
    """
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
                f"{tuple(missing.shape)} are NaN or infinite in every record: no gradient would be "
                "finite, and the model would be trained on noise alone. Leave them out, or fill them in "
                "from what is public; a mask goes in as booleans."
            )


def records_that_fit(model: nn.Module, loss: Loss, inputs: Any, targets: Any, tape: GradientTape) -> int:
    """Records to work on at once, from the memory that these few keep between forward and backward."""
    limit = memory_limit(next(model.parameters()).device)
    factors = sum(value.untyped_storage().nbytes() for value in tape.tensors())
    used = activations(model, loss, inputs, targets) + factors
    return max(1, limit * tape.records // max(1, used))


def memory_limit(device: torch.device) -> int:
    """Bytes that a physical batch may keep: on a GPU a quarter of what this process may still take."""
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
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with _SavedTensors(note):
        values = loss(call_model(model, inputs), targets)
    del values
    return sum(kept.values())


class _SavedTensors(TorchFunctionMode):
    """Torch function mode that notes what autograd saves, also inside of checkpointed segments."""

    def __init__(self, note: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._note = note

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with saved_tensors_hooks(self._note, lambda value: value):
            return func(*args, **(kwargs or {}))
