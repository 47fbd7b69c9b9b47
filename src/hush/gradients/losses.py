"""Losses of one value a record, made of those that reduce over a batch, and why not of others."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import DataError
from hush.gradients.tree import Loss


def per_sample_loss(loss: Any) -> Loss:
    """The per-sample loss: a loss module's reduction over the batch is undone."""
    reduction = getattr(loss, "reduction", "none")
    if reduction == "none" and not isinstance(loss, CLASS_LOSSES + _ELEMENTWISE_LOSSES):
        return loss  # type: ignore[no-any-return]
    unreduced = loss
    if reduction != "none":
        unreduced = copy.copy(loss)
        unreduced.reduction = "none"
    return PerSampleLoss(unreduced, reduction)


def criterion_of(loss: Loss) -> Any:
    """The loss that `per_sample_loss` was given, or a copy of it that does not reduce."""
    return loss.loss if isinstance(loss, PerSampleLoss) else loss


@dataclass(frozen=True)
class PerSampleLoss:
    """A loss module without reduction over the batch; within a record it reduces as before."""

    loss: Any
    record_reduction: str
    """none, mean or sum; not named `reduction`, by which `per_sample_loss` knows a loss that reduces."""

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if isinstance(self.loss, CLASS_LOSSES) and getattr(targets, "dtype", None) == torch.uint8:
            targets = targets.long()  # torch takes bytes as classes, but not under vmap
        if isinstance(outputs, Tensor):
            _check_shapes(self.loss, outputs, targets)
        values: Tensor = self.loss(outputs, targets)
        if self.record_reduction == "none" or values.dim() == 1:
            return values
        flat = values.flatten(1)
        if self.record_reduction == "sum":
            return flat.sum(1)
        if isinstance(self.loss, CLASS_LOSSES) and not targets.is_floating_point():
            # as torch has it within a batch: the mean over positions that are not ignored
            counted: Tensor = (targets != self.loss.ignore_index).reshape(flat.shape).sum(1)
            return flat.sum(1) / counted.clamp(min=1)
        return flat.mean(1)


CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_ELEMENTWISE_LOSSES = (
    *(nn.BCELoss, nn.BCEWithLogitsLoss, nn.HuberLoss, nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss),
)
"""Losses of outputs and targets of one shape; torch lets some of them broadcast, also over records."""


def _check_shapes(loss: Any, outputs: Tensor, targets: Any) -> None:
    """Raise if a loss of one shape would broadcast, or there is no class number for a row of scores."""
    shape, labels = tuple(outputs.shape), tuple(getattr(targets, "shape", ()))
    if isinstance(loss, _ELEMENTWISE_LOSSES) and len(shape) != len(labels):
        raise DataError(
            f"outputs of shape {shape} and targets of shape {labels}: broadcast against each "
            "other, one record's output would be compared with another's target. Pass targets of the "
            "outputs' shape, e.g. targets.unsqueeze(1) for outputs of shape (records, 1)."
        )
    numbers = isinstance(targets, Tensor) and not targets.is_floating_point()  # or probabilities
    if isinstance(loss, CLASS_LOSSES) and numbers and len(shape) >= 2:
        fitting = (shape[0], *shape[2:])
        if labels != fitting:
            way_out = "targets.squeeze(-1)" if labels == (*fitting, 1) else "targets of that shape"
            raise DataError(
                f"a record has scores of shape {shape[1:]} and labels of shape {labels[1:]}: the loss "
                f"takes one class number for each vector of scores, labels of shape {fitting[1:]}. "
                f"Pass {way_out}."
            )
