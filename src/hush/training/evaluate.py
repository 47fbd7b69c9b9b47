"""Evaluation of loss and accuracy on records that need no protection."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import DataError
from hush.gradients.losses import CLASS_LOSSES, PerSampleLoss, per_sample_loss
from hush.gradients.tree import Loss, call_model, tree_leaves, tree_map
from hush.training.data import Batch, Data, count, describe_record

_BATCH = 1024


def check_evaluation(model: nn.Module, loss: Any, evaluation: Data, data: Data) -> None:
    """Raise if the model cannot be evaluated on all evaluation records, before the first charge.

    Messages may describe evaluation records, which need no protection. The caller restores the model.
    """
    try:
        evaluate(model, loss, evaluation)
    except DataError as error:
        raise DataError(f"evaluation: {error}") from error
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise DataError(
            f"the model cannot be evaluated ({reason}): an evaluation record is "
            f"{describe_record(evaluation)}, and a training record is {describe_record(data)}; no step "
            "was charged. Pass evaluation data with the types, shapes and classes of the training data."
        ) from error


@torch.no_grad()
def evaluate(model: nn.Module, loss: Any, data: Data) -> dict[str, float]:
    """Mean loss, and accuracy if the outputs are class scores; NaN without valid targets.

    The mean of a classification loss is weighted by class, as in torch. Loss and accuracy exclude
    targets equal to `ignore_index`. Evaluation is not accounted for: pass public or held-out records,
    not the training set. The model is unchanged.
    """
    unreduced = per_sample_loss(loss)
    ignored = getattr(loss, "ignore_index", None)
    device = next(model.parameters()).device
    torch.clear_autocast_cache()  # an outer autocast context caches copies of earlier weights
    total_loss, total_weight, right, scored, classified = 0.0, 0.0, 0, 0, True
    batch = Batch(torch.arange(count(data)), data, _BATCH)
    with evaluation_mode(model), _all_buffers_restored(model):
        for inputs, targets, _, _ in batch.physical_batches():
            inputs, targets = tree_map((inputs, targets), lambda rows: rows.to(device))
            outputs = _outputs(model, inputs)
            losses, weight = _summed(unreduced, outputs, targets)
            total_loss, total_weight = total_loss + losses, total_weight + weight
            scores = isinstance(outputs, Tensor) and outputs.dim() == 2
            classified = scores and targets.dim() == 1 and not targets.is_floating_point()
            if classified:
                kept = torch.ones_like(targets).bool() if ignored is None else targets != ignored
                right += int(((outputs.argmax(1) == targets) & kept).sum())
                scored += int(kept.sum())
    result = {"loss": total_loss / total_weight if total_weight else math.nan}
    if classified:
        result["accuracy"] = right / scored if scored else math.nan
    return result


def _outputs(model: nn.Module, inputs: Any) -> Any:
    """Call the model; gradients are enabled only if forward() needs them (e.g. a force field)."""
    try:
        return call_model(model, inputs)
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
        with torch.enable_grad():
            return call_model(model, inputs)


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context that sets the model to evaluation mode, and restores the mode of each module."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _all_buffers_restored(model: nn.Module) -> Iterator[None]:
    tables = [module._buffers for module in model.modules()]
    held = [(table, name, value) for table in tables for name, value in table.items()]
    before = [(table, name, value, value.clone()) for table, name, value in held if value is not None]
    try:
        yield
    finally:
        for buffers, name, buffer, value in before:
            buffers[name] = buffer
            if not torch.equal(
                buffer, value
            ):  # an unnecessary write would be detected as a change outside of the step
                buffer.copy_(value)


def _summed(unreduced: Loss, outputs: Any, targets: Any) -> tuple[float, float]:
    """Sum of the losses, and the sum of the weights by which the mean divides it."""
    classes = isinstance(unreduced, PerSampleLoss) and isinstance(unreduced.loss, CLASS_LOSSES)
    if not classes or not isinstance(targets, Tensor) or targets.is_floating_point():
        losses, records = unreduced(outputs, targets).double(), len(next(tree_leaves(targets)))
        return float(losses.mean() * records if losses.dim() == 0 else losses.sum()), float(records)
    assert isinstance(unreduced, PerSampleLoss)
    counted, weight = targets != unreduced.loss.ignore_index, unreduced.loss.weight
    total = float(PerSampleLoss(unreduced.loss, "none")(outputs, targets).double().sum())
    if unreduced.record_reduction == "sum":  # sum over positions, mean over records
        counted = counted.reshape(len(targets), -1).any(1)
    elif weight is not None:
        return total, float((weight.double()[targets.long().where(counted, 0)] * counted).sum())
    return total, float(counted.sum())
