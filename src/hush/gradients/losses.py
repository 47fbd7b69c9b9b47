"""Conversion of losses that reduce over a batch to per-sample losses."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hush.core.errors import DataError
from hush.gradients.tree import Loss


def per_sample_loss(loss: Any) -> Loss:
    """Convert a loss to a per-sample loss, without its reduction over the batch."""
    reduction = getattr(loss, "reduction", "none")
    if reduction == "none" and not isinstance(loss, CLASS_LOSSES + _ELEMENTWISE_LOSSES):
        return loss  # type: ignore[no-any-return]
    unreduced = loss
    if reduction != "none":
        unreduced = copy.copy(loss)
        unreduced.reduction = "none"
    return PerSampleLoss(unreduced, reduction)


def criterion_of(loss: Loss) -> Any:
    """Wrapped loss of a `PerSampleLoss`; other losses are returned unchanged."""
    return loss.loss if isinstance(loss, PerSampleLoss) else loss


@dataclass(frozen=True)
class PerSampleLoss:
    """Loss module without reduction over the batch; reductions within a record are unchanged."""

    loss: Any
    record_reduction: str
    """Original reduction (none, mean or sum). The name `reduction` would mark this loss as reducing."""

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        if isinstance(self.loss, CLASS_LOSSES) and getattr(targets, "dtype", None) == torch.uint8:
            targets = targets.long()  # torch supports bytes as classes, but not under vmap
        if isinstance(outputs, Tensor):
            _check_shapes(self.loss, outputs, targets)
        values: Tensor = self.loss(outputs, targets)
        if self.record_reduction == "none" or values.dim() == 1:
            return values
        flat = values.flatten(1)
        if self.record_reduction == "sum":
            return flat.sum(1)
        if isinstance(self.loss, CLASS_LOSSES) and not targets.is_floating_point():
            # mean over positions that are not ignored, as in torch
            counted: Tensor = (targets != self.loss.ignore_index).reshape(flat.shape).sum(1)
            return flat.sum(1) / counted.clamp(min=1)
        return flat.mean(1)


CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_ELEMENTWISE_LOSSES = (
    *(nn.BCELoss, nn.BCEWithLogitsLoss, nn.HuberLoss, nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss),
)
"""Losses that need equal shapes of outputs and targets. torch broadcasts some of them over records."""


def _check_shapes(loss: Any, outputs: Tensor, targets: Any) -> None:
    """Raise if an elementwise loss would broadcast, or if labels and scores have different shapes."""
    shape, labels = tuple(outputs.shape), tuple(getattr(targets, "shape", ()))
    if isinstance(loss, _ELEMENTWISE_LOSSES) and len(shape) != len(labels):
        raise DataError(
            f"outputs of shape {shape} and targets of shape {labels}: broadcasting "
            "would compare one record's output with another's target. Pass targets of the outputs' "
            "shape, e.g. targets.unsqueeze(1) for outputs of shape (records, 1)."
        )
    numbers = isinstance(targets, Tensor) and not targets.is_floating_point()  # otherwise probabilities
    if isinstance(loss, CLASS_LOSSES) and numbers and len(shape) >= 2:
        fitting = (shape[0], *shape[2:])
        if labels != fitting:
            way_out = "targets.squeeze(-1)" if labels == (*fitting, 1) else "targets of that shape"
            raise DataError(
                f"a record has scores of shape {shape[1:]} and labels of shape {labels[1:]}: the loss "
                f"needs one class index per score vector, i.e. labels of shape {fitting[1:]}. "
                f"Pass {way_out}."
            )
